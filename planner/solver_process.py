"""Planning in a child process: the parent pickles the question to its stdin, it pickles the answer to its stdout.

The solver must not run in the training process. CBC sets the number of OpenMP threads of its process to one, which
slows every later operator and changes the bits of reductions. It installs handlers for SIGABRT, SIGFPE and SIGSEGV.
python-mip leaks about 34 KB per model.
"""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys

from ds_adacc.planner.problem import Problem
from ds_adacc.planner.solution import InfeasibleBudget, NoSolutionInTime, Solution, check_request
from ds_adacc.planner.solve_per_block import solve_per_block
from ds_adacc.planner.solve_uniform import least_peak
from ds_adacc.planner.strictness import merged, split
from ds_adacc.planner.without_solver import leanest, without_solver

Question = tuple[Problem, int | None, float]  # the budget in bytes, None: the smallest peak; the solver's seconds

_START_SECONDS = 5.0
_MARK = b"\0answer of ds_adacc.planner\0"  # what stands before it on stdout was printed while Python started


def solve_in_process(problem: Problem, budget: int, *, max_seconds: float) -> Solution:
    """As `solve_per_block`, and as reproducible, but in a process of its own (about 0.3 s to start).

    Waits for at most `2 * max_seconds + 5` seconds. If the process gives no answer by then, or ends without one, the
    policies are those of `without_solver`. Raises what `solve_per_block` raises.
    """
    check_request(budget, max_seconds)
    parts = split(problem)
    try:
        solution = _ask((parts, budget, max_seconds))
    except _NoAnswer as error:
        solution = without_solver(parts, budget, str(error))
    return merged(problem, solution)


def least_peak_in_process(problem: Problem, *, max_seconds: float) -> Solution:
    """As `least_peak`, in a process of its own.

    If the solver finds none in time, or its process gives no answer, the policies are the leanest of simple rules.
    Raises ValueError for a bad argument.
    """
    check_request(0, max_seconds)
    parts = split(problem)
    try:
        solution = _ask((parts, None, max_seconds))
    except (_NoAnswer, NoSolutionInTime) as error:
        solution = leanest(parts, str(error))
    return merged(problem, solution)


class _NoAnswer(RuntimeError):
    """The solver's process gave no answer; the text says why."""


def _ask(question: Question) -> Solution:
    # Two searches of max_seconds each are the most that an infeasible budget takes; the rest is to start Python.
    limit = 2 * question[2] + _START_SECONDS
    try:
        child = subprocess.run(
            [sys.executable, "-m", "ds_adacc.planner.solver_process"],
            input=pickle.dumps(question),
            capture_output=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired as error:
        raise _NoAnswer(f"the solver's process gave no answer in {limit:g} seconds") from error
    except OSError as error:  # such as no memory for a process
        raise _NoAnswer(f"the solver's process did not start: {error}") from error
    _, marked, answer = child.stdout.partition(_MARK)
    if child.returncode < 0:  # CBC aborts now and then, where its own check of a cut fails
        raise _NoAnswer(f"the solver's process was ended by signal {-child.returncode}")
    if child.returncode != 0 or not marked:
        said = child.stderr.decode(errors="replace").strip()[-2000:]
        raise _NoAnswer(f"the solver's process ended with code {child.returncode}: {said}")
    solution = pickle.loads(answer)
    if isinstance(solution, Exception):
        raise solution
    return solution


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


def _answer(question: Question) -> Solution | InfeasibleBudget | NoSolutionInTime:
    problem, budget, max_seconds = question
    try:
        if budget is None:
            return least_peak(problem, max_seconds)
        return solve_per_block(problem, budget, max_seconds=max_seconds)
    except (InfeasibleBudget, NoSolutionInTime) as error:
        return error


if __name__ == "__main__":
    _serve()
