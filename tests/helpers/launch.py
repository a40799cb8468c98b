"""Start a script on several ranks of this machine and wait for them.

A rank is a fork of one process that has imported torch, DeepSpeed and transformers: imported anew, these take each rank
about ten seconds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# DeepSpeed imports original_muon, and with it torch's compiler, when it looks at an optimizer.
IMPORTED = ["deepspeed.runtime.zero.muon.original_muon", "transformers.models.llama.modeling_llama"]


def on_ranks(script, *arguments, ranks=2, seconds=240):
    """Run `script` (beside this file) once a rank; raises AssertionError with the output of one that fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    start = forks()
    children = []
    with ExitStack() as files:  # a pipe would fill up while another rank is awaited
        logs = [files.enter_context(tempfile.NamedTemporaryFile("w+")) for _ in range(ranks)]
        for rank, log in enumerate(logs):
            environment = {**os.environ, **shared, **ALONE, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            child = start(target=be_rank, args=(script, [*map(str, arguments)], environment, log.name))
            child.start()
            children.append(child)
        outputs = wait(children, logs, time.monotonic() + seconds)
    for rank, (child, output) in enumerate(zip(children, outputs, strict=True)):
        assert child.exitcode == 0, f"rank {rank} ended with {child.exitcode}:\n{output[-6000:]}"
    return outputs


ALONE = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}  # read when torch and DeepSpeed are imported


def forks():
    """`Process` of a server that forks; the first call starts it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ALONE.items():
            patch.setenv(name, value)
        multiprocessing.forkserver.ensure_running()
    return context.Process


def be_rank(script, arguments, environment, log):
    """Be what `python script arguments` would be: its environment, its arguments, its output in the file `log`."""
    os.environ.clear()
    os.environ.update(environment)
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(HERE))
    runpy.run_path(str(HERE / script), run_name="__main__")


def told(folder, ranks=2):
    """What the ranks have written to rank0.json, rank1.json and so on in `folder`."""
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def wait(children, logs, deadline):
    """What the children printed; those still running at the deadline, or after one has failed, are killed."""
    while any(child.is_alive() for child in children):
        if time.monotonic() > deadline or any(child.exitcode for child in children):
            break
        time.sleep(0.1)
    for child in children:
        child.kill()
        child.join()
    return [Path(log.name).read_text() for log in logs]
