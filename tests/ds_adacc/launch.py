"""Start a script on several ranks of this machine and wait for them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def on_ranks(script, *arguments, ranks=2, seconds=240):
    """Run `script` (beside this file) once a rank; raises AssertionError with the output of one that fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    children = []
    for rank in range(ranks):
        environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, str(HERE / script), *map(str, arguments)]
        children.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    try:
        outputs = [child.communicate(timeout=seconds)[0].decode() for child in children]
    finally:
        for child in children:
            child.kill()
    for rank, (child, output) in enumerate(zip(children, outputs, strict=True)):
        assert child.returncode == 0, f"rank {rank}:\n{output[-6000:]}"
    return outputs
