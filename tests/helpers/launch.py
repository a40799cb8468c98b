"""Start a script on several ranks of this machine and wait for them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
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
    with ExitStack() as files:  # a pipe would fill up while another rank is awaited
        logs = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        for rank, log in enumerate(logs):
            environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, str(HERE / script), *map(str, arguments)]
            children.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        outputs = wait(children, logs, time.monotonic() + seconds)
    for rank, (child, output) in enumerate(zip(children, outputs, strict=True)):
        assert child.returncode == 0, f"rank {rank} ended with {child.returncode}:\n{output[-6000:]}"
    return outputs


def told(folder, ranks=2):
    """What the ranks have written to rank0.json, rank1.json and so on in `folder`."""
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def wait(children, logs, deadline):
    """What the children printed; those still running at the deadline, or after one has failed, are killed."""
    while any(child.poll() is None for child in children):
        if time.monotonic() > deadline or any(child.poll() for child in children):
            break
        time.sleep(0.1)
    for child in children:
        child.kill()
        child.wait()
    outputs = []
    for log in logs:
        log.seek(0)
        outputs.append(log.read())
    return outputs
