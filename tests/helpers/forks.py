"""Processes that are forks of one which has imported torch, DeepSpeed, transformers and ds_adacc.

Imported anew, these take each rank about ten seconds, and each solver a third of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import pytest

# DeepSpeed imports original_muon, and with it torch's compiler, when it looks at an optimizer.
IMPORTED = [
    "deepspeed.runtime.zero.muon.original_muon",
    "transformers.models.llama.modeling_llama",
    "ds_adacc.engine.api",
    "ds_adacc.planner.solver_process",
    "mip.cbc",  # which it imports at its first model, and takes 0.3 s
]
PYTHON = sys.executable
ALONE = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}  # read when torch and DeepSpeed are imported


def start(target, *arguments):
    """A new process, as `multiprocessing.Process` is, that calls `target`; the first call starts their server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ALONE.items():
            patch.setenv(name, value)
        forkserver.ensure_running()
    process = context.Process(target=target, args=arguments)
    process.start()
    return process


def fork(target, *arguments):
    """As `start`, from this process. A rank has no server, and one of its own would import everything anew."""
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    process.start()
    return process


def become(stdout, stderr, environment):
    """Write what is printed from now on, by Python or not, to these files; have this environment."""
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, path in ((1, stdout), (2, stderr)):
        with open(path, "ab") as file:
            os.dup2(file.fileno(), descriptor)


def run_solver(start, command, *, input, capture_output, timeout):
    """In place of `subprocess.run`, for the command that starts the solver: the same in a process that `start` makes.

    If a test has put a program of its own in the place of Python, that runs.
    """
    if command[0] != PYTHON:
        return subprocess.run(command, input=input, capture_output=capture_output, timeout=timeout)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("stdin", "stdout", "stderr")]
        paths[0].write_bytes(input)
        child = start(solve, *paths)
        child.join(timeout)
        if child.is_alive():
            child.kill()
            child.join()
            raise subprocess.TimeoutExpired(command, timeout)
        stdout, stderr = (path.read_bytes() for path in paths[1:])
    return SimpleNamespace(returncode=child.exitcode, stdout=stdout, stderr=stderr)


def solve(stdin, stdout, stderr):
    from ds_adacc.planner import solver_process

    become(stdout, stderr, dict(os.environ))
    with open(stdin) as sys.stdin:
        solver_process._serve()


def quicken_solver(patch, start=start):
    """Have the planner's solvers start as forks, by `start` or by `fork`."""
    from ds_adacc.planner import solver_process

    quick = SimpleNamespace(run=partial(run_solver, start), TimeoutExpired=subprocess.TimeoutExpired)
    patch.setattr(solver_process, "subprocess", quick)
