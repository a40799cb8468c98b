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

Question = tuple[Problem, int | None, float]  # the budget in bytes, None: the smallest peak; the solver's seconds

_START_SECONDS = 60.0
_MARK = b"\0answer of ds_adacc.planner\0"  # what stands before it on stdout was printed while Python started


def solve_in_process(problem: Problem, budget: int, *, max_seconds: float) -> Solution:
    """As `solve_per_block`, and as reproducible, but in a process of its own (about 0.3 s to start).

    Raises what `solve_per_block` raises, NoSolutionInTime also if a signal ends the child, and RuntimeError with the
    last lines of its stderr if it fails otherwise.
    """
    check_request(budget, max_seconds)
    return merged(problem, _ask((split(problem), budget, max_seconds)))


def least_peak_in_process(problem: Problem, *, max_seconds: float) -> Solution:
    """As `least_peak`, in a process of its own; errors as in `solve_in_process`."""
    check_request(0, max_seconds)
    return merged(problem, _ask((split(problem), None, max_seconds)))


def _ask(question: Question) -> Solution:
    try:
        child = subprocess.run(
            [sys.executable, "-m", "ds_adacc.planner.solver_process"],
            input=pickle.dumps(question),
            capture_output=True,
            timeout=_START_SECONDS + 10 * question[2],
        )
    except subprocess.TimeoutExpired as error:
        raise NoSolutionInTime(f"the solver's process gave no answer in {error.timeout:.0f} seconds") from error
    _, marked, answer = child.stdout.partition(_MARK)
    if child.returncode < 0:  # CBC aborts now and then, where its own check of a cut fails
        raise NoSolutionInTime(f"the solver's process was ended by signal {-child.returncode}")
    if child.returncode != 0 or not marked:
        said = child.stderr.decode(errors="replace").strip()[-2000:]
        raise RuntimeError(f"the solver's process ended with code {child.returncode}: {said}")
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
