"""Planning in a child process: the parent pickles the question to its stdin, it pickles the answer to its stdout.

The solver must not run in the training process. CBC sets the number of OpenMP threads of its process to one, which
slows every later operator and changes the bits of reductions. It installs handlers for SIGABRT, SIGFPE and SIGSEGV.
python-mip leaks about 34 KB per model.
"""

from __future__ import annotations

import functools
import gc
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from ds_adacc.planner.problem import Problem
from ds_adacc.planner.solution import InfeasibleBudget, NoSolutionInTime, Solution, check_request
from ds_adacc.planner.solve_per_block import solve_per_block
from ds_adacc.planner.solve_uniform import least_peak
from ds_adacc.planner.split_by_strictness import merged, split
from ds_adacc.planner.without_solver import leanest, without_solver

Found = TypeVar("Found")

_START_SECONDS = 5.0
FAILED = "the solver's process failed"  # with this begins a text of `NoAnswer` if more time would not have helped
_MARK = b"\0answer of ds_adacc.planner\0"  # what stands before it on stdout was printed while Python started
# Run with the parent's `sys.path` as arguments. `python -m` would look in the current directory first, where a clone of
# this project has a folder of the same name without the planner.
_CHILD = "import sys; sys.path[:] = sys.argv[1:]; from ds_adacc.planner import solver_process; solver_process._serve()"


def solve_in_process(problem: Problem, budget: int, *, max_seconds: float) -> Solution:
    """As `solve_per_block`, and as reproducible, but in a process of its own (about 0.3 s to start).

    Waits for the process for at most `2 * max_seconds + 5` seconds. If it gives no answer by then, or ends without one,
    the policies are those of `without_solver`, which takes time too: some seconds for dozens of block types. Raises
    what `solve_per_block` raises.
    """
    check_request(budget, max_seconds)
    parts = split(problem)
    try:
        solution = in_process(solve_per_block, parts, budget, max_seconds=max_seconds)
    except NoAnswer as error:
        solution = without_solver(parts, budget, str(error))
    return merged(problem, solution)


def least_peak_in_process(problem: Problem, *, max_seconds: float) -> Solution:
    """As `least_peak`, in a process of its own.

    If the solver finds none in time, or its process gives no answer, the policies are the leanest of simple rules. It
    waits as `solve_in_process` does. Raises ValueError for a bad argument.
    """
    check_request(0, max_seconds)
    parts = split(problem)
    try:
        solution = in_process(least_peak, parts, max_seconds=max_seconds)
    except (NoAnswer, NoSolutionInTime) as error:
        solution = replace(leanest(parts), fallback=str(error))
    return merged(problem, solution)


class NoAnswer(RuntimeError):
    """The solver's process gave no answer; the text says why."""


def in_process(search: Callable[..., Found], *given: Any, max_seconds: float, **more: Any) -> Found:
    """What `search(*given, max_seconds=max_seconds, **more)` returns or raises, in a process of its own.

    `search` is a function of this package. Raises NoAnswer if there is none after `2 * max_seconds + 5` seconds, or the
    process ends without one.
    """
    question = functools.partial(search, *given, max_seconds=max_seconds, **more)
    # Two searches of max_seconds each are the most that an infeasible budget takes; the rest is to start Python.
    limit, began = 2 * max_seconds + _START_SECONDS, time.perf_counter()
    child = _run(question, limit, limit)
    if child.returncode == -signal.SIGABRT:  # CBC does so now and then, where a check of its own fails, and not again
        child = _run(question, limit - (time.perf_counter() - began), limit)
    _, marked, answer = child.stdout.partition(_MARK)
    if child.returncode < 0:
        raise NoAnswer(f"{FAILED}: it was ended by signal {-child.returncode}")
    if child.returncode != 0 or not marked:
        raise NoAnswer(
            f"{FAILED}: it ended with code {child.returncode}: {_last_words(child.stderr)}. `ds_adacc doctor` "
            "tells whether the solver works here; if it does, please report this"
        )
    found = pickle.loads(answer)
    try:
        if isinstance(found, Exception):
            raise found
        return found
    finally:
        del found  # else the error's traceback, which has this frame, would keep all that called until a collection


def _last_words(stderr: bytes) -> str:
    """The end of what a process has printed, in one line: of a traceback the exception and where it was raised."""
    lines = stderr.decode(errors="replace").strip().splitlines() or ["it printed nothing"]
    places = [line.strip() for line in lines if line.startswith('  File "')]
    return f"{lines[-1]} ({places[-1]})" if places else lines[-1]


def _run(question: Callable[[], Any], seconds: float, limit: float) -> subprocess.CompletedProcess[bytes]:
    """One process that is asked, for at most so many seconds; `limit`: the most that may be told of."""
    try:
        return subprocess.run(
            [sys.executable, "-c", _CHILD, *sys.path],
            input=pickle.dumps(question),
            capture_output=True,
            timeout=max(seconds, 0.0),
        )
    except subprocess.TimeoutExpired as error:
        raise NoAnswer(f"the solver's process gave no answer in {limit:g} seconds") from error
    except OSError as error:  # such as no memory for a process
        raise NoAnswer(f"{FAILED}: it did not start: {error}") from error


def _serve() -> None:
    """Answer the question on stdin."""
    # The cyclic collector may run python-mip's Model.__del__ inside a call to CBC, where it waits for a lock that its
    # own thread holds.
    gc.disable()
    # From here on whatever Python or CBC print to stdout goes to stderr, so that nothing gets into the answer.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    answer = _answer(pickle.load(sys.stdin.buffer))
    with answers:
        answers.write(_MARK + pickle.dumps(answer))
    os._exit(0)  # Python would delete CBC's models, which may abort: the answer would be lost


def _answer(question: Callable[[], Found]) -> Found | InfeasibleBudget | NoSolutionInTime:
    try:
        return question()
    except (InfeasibleBudget, NoSolutionInTime) as error:
        return error
