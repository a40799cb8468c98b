"""Solvers that are forks of a process which has imported the planner alone.

A solver starts there in about 10 ms. A fork of a process with torch and DeepSpeed takes ten times as long, and a new
Python thirty times.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace

ADDRESS = "TESTS_SOLVERS_ADDRESS"  # in the environment of a rank: the socket of the server of the tests
PYTHON = sys.executable


def run_solver(command, *, input, capture_output, timeout):
    """In place of `subprocess.run`, for the command that starts the solver: the same in a fork of the server.

    If a test has put a program of its own in the place of Python, that runs.
    """
    if command[0] != PYTHON:
        return subprocess.run(command, input=input, capture_output=capture_output, timeout=timeout)
    try:
        return ask(tuple(command), input, timeout)
    except subprocess.CalledProcessError as error:
        return subprocess.CompletedProcess(command, error.returncode, error.stdout, error.stderr)


@functools.lru_cache(maxsize=256)
def ask(command, input, timeout):
    """What a solver answers. One that is asked the same again would find the same.

    Raises TimeoutExpired if there is no answer in `timeout` seconds, and CalledProcessError if the solver fails.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        paths = [Path(folder, name) for name in ("stdin", "stdout", "stderr")]
        paths[0].write_bytes(input)
        server.connect(address())
        with server.makefile("rw") as told:
            print(json.dumps([[*map(str, paths)], command[3:]]), file=told, flush=True)
            solver = int(told.readline())
            if not select.select([server], [], [], timeout)[0]:
                os.kill(solver, signal.SIGKILL)
                told.readline()
                raise subprocess.TimeoutExpired(command, timeout)
            code = int(told.readline())
        stdout, stderr = (path.read_bytes() for path in paths[1:])
    done = subprocess.CompletedProcess(command, code, stdout, stderr)
    done.check_returncode()
    return done


def quicken_solver(patch):
    """Have the planner's solvers start as forks of the server."""
    from ds_adacc.planner import solver_process

    quick = SimpleNamespace(run=run_solver, TimeoutExpired=subprocess.TimeoutExpired)
    patch.setattr(solver_process, "subprocess", quick)


def address():
    """The socket of the server; the first call starts it, unless a rank has been told of one."""
    return os.environ.get(ADDRESS) or _started()[1]


@functools.cache
def _started():
    """The server, which ends with this process, and its socket."""
    folder = tempfile.TemporaryDirectory()
    path = str(Path(folder.name, "socket"))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = subprocess.Popen([PYTHON, __file__, path], **pipes, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert server.stdout.readline() == b"ready\n"
    return server, path, folder


def serve(path):
    """Answer each client in a process of its own, until stdin is closed."""
    importlib.import_module("mip.cbc")  # which the planner imports at its first model, and takes 0.3 s
    solver_process = importlib.import_module("ds_adacc.planner.solver_process")
    # The planner's own tests look for 64 points between two corners. Here any good plan will do.
    importlib.import_module("ds_adacc.planner.frontier")._FOR_FEW = (8,)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            client, _ = listener.accept()
            if os.fork() == 0:
                listener.close()  # else nobody notices if the server dies
                answer(client, solver_process)
            client.close()


def answer(client, solver_process):
    """Read the paths of a solver's stdin, stdout and stderr, and its `sys.path`; tell its process and its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with client.makefile("rw") as told:
        files, modules = json.loads(told.readline())
        solver = os.fork()
        if solver == 0:
            solve(files, modules, solver_process)
        print(solver, file=told, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(solver, 0)[1]), file=told, flush=True)
    os._exit(0)


def solve(files, modules, solver_process):
    """Be the solver, and end as Python does."""
    for descriptor, (path, how) in enumerate(zip(files, ("rb", "ab", "ab"), strict=True)):
        with open(path, how) as file:
            os.dup2(file.fileno(), descriptor)
    sys.path[:] = modules
    try:
        solver_process._serve()
    except BaseException:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    serve(sys.argv[1])
