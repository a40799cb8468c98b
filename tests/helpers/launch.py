"""Start a script or a worker on several ranks of this machine, or a launcher of scripts, and wait for them."""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from cases import cases_that_run
from equal_times import make_times_equal
from forks import ALONE, become, start
from processes import free_port
from solvers import ADDRESS, address, quicken_solver

HERE = Path(__file__).parent


def told_by(worker, values_of=None, ranks=2, seconds=240):
    """A fixture: what each rank of the worker has told, or the only one, once for all tests of a file.

    The worker's `main` gets a folder of its own and the values that the parameter `values_of` has in the tests that
    run.
    """

    @pytest.fixture(scope="module")
    def all_told(request, tmp_path_factory):
        out = tmp_path_factory.mktemp(worker)
        values = cases_that_run(request, values_of) if values_of else []
        on_ranks(worker, out, *values, ranks=ranks, seconds=seconds)
        return told(out, ranks) if ranks > 1 else told(out, ranks)[0]

    return all_told


def on_ranks(program, *arguments, ranks=2, seconds=240):
    """Run `program` once a rank: the path of a script, or the name of a worker; what each has printed.

    A worker is a module beside this file. What its `main(out, *arguments)` returns, `told(out)` reads.

    Raises AssertionError with the output of one that fails.
    """
    children = []
    with ExitStack() as files:  # a pipe would fill up while another rank is awaited
        port = files.enter_context(free_port())
        shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, ADDRESS: address()}
        logs = [files.enter_context(tempfile.NamedTemporaryFile("w+")) for _ in range(ranks)]
        for rank, log in enumerate(logs):
            environment = {**os.environ, **shared, **ALONE, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            children.append(start(be_rank, program, [*map(str, arguments)], environment, log.name))
        outputs = wait(children, logs, time.monotonic() + seconds)
    for rank, (child, output) in enumerate(zip(children, outputs, strict=True)):
        assert child.exitcode == 0, f"rank {rank} ended with {child.exitcode}:\n{output[-6000:]}"
    return outputs


def be_rank(program, arguments, environment, log):
    """Be what `python program arguments` would be, with its output in the file `log`; but plans depend on no time."""
    become(log, log, environment)
    gc.freeze()  # DeepSpeed collects now and then, and what all ranks have imported is no part of that
    sys.path.insert(0, str(HERE))
    patch = pytest.MonkeyPatch()  # for as long as the process runs
    quicken_solver(patch)
    make_times_equal(patch)
    if isinstance(program, Path):
        sys.argv = [str(program), *arguments]
        runpy.run_path(str(program), run_name="__main__")
    else:
        out, *arguments = arguments
        results = importlib.import_module(program).main(Path(out), *arguments)
        Path(out, f"rank{environment['RANK']}.json").write_text(json.dumps(results))


def by_launcher(module, *arguments, folder=HERE, seconds=240):
    """The exit code and the output of `python -m module arguments`, started in this folder.

    The launcher itself need not import DeepSpeed anew; what it starts does.
    """
    with tempfile.NamedTemporaryFile("w+") as log:
        launcher = start(be_launcher, module, [*map(str, arguments)], {**os.environ, **ALONE}, folder, log.name)
        (output,) = wait([launcher], [log], time.monotonic() + seconds)
    return launcher.exitcode, output


def be_launcher(module, arguments, environment, folder, log):
    become(log, log, environment)
    os.chdir(folder)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def told(folder, ranks=2):
    """What the ranks have told, which is in rank0.json, rank1.json and so on in `folder`."""
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
