"""Planning in a child process.

CBC sets the OpenMP thread count of its process to one, which slows every later operator and changes the bits of
reductions; it installs handlers for SIGABRT, SIGFPE and SIGSEGV; and python-mip leaks about 34 KB a model. None of it
may reach the training process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from ds_adacc.planner.policy import Policy
from ds_adacc.planner.problem import Problem
from ds_adacc.planner.profile import BlockType, Profile
from ds_adacc.planner.solution import InfeasibleBudget, NoSolutionInTime, Solution, check_request
from ds_adacc.planner.solve_per_block import solve_per_block

_START_SECONDS = 60.0


def solve_in_process(problem: Problem, budget: int, *, max_seconds: float) -> Solution:
    """As `solve_per_block`, and as reproducible, but in a process of its own (about 0.3 s to start).

    Raises what `solve_per_block` raises, and RuntimeError with the child's last words if it dies.
    """
    check_request(budget, max_seconds)
    question = json.dumps({"problem": _told(problem), "budget": budget, "max_seconds": max_seconds})
    try:
        child = subprocess.run(
            [sys.executable, "-m", "ds_adacc.planner.solver_process"],
            input=question,
            capture_output=True,
            text=True,
            timeout=_START_SECONDS + 10 * max_seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise NoSolutionInTime(f"the solver's process gave no answer in {error.timeout:.0f} seconds") from error
    if child.returncode != 0:
        raise RuntimeError(f"the solver's process ended with code {child.returncode}: {child.stderr.strip()[-2000:]}")
    return _read(json.loads(child.stdout.splitlines()[-1]))


def _told(problem: Problem) -> dict[str, Any]:
    return {
        "block_types": [
            {**vars(block_type), "profile": block_type.profile.to_json()} for block_type in problem.block_types
        ],
        "together": [sorted(names) for names in problem.live_sets],
        "order": problem.order,
        "max_gradient_error": problem.max_gradient_error,
    }


def _heard(told: dict[str, Any]) -> Problem:
    block_types = tuple(
        BlockType(**{**block_type, "profile": Profile.from_json(block_type["profile"])})
        for block_type in told["block_types"]
    )
    live_sets = tuple(frozenset(names) for names in told["together"])
    return Problem(block_types, live_sets, tuple(told["order"]), told["max_gradient_error"])


def _read(answer: dict[str, Any]) -> Solution:
    if "infeasible" in answer:
        raise InfeasibleBudget(*answer["infeasible"])
    if "no_solution" in answer:
        raise NoSolutionInTime(answer["no_solution"])
    distinct = [Policy.from_json(policy) for policy in answer.pop("distinct")]
    policies = tuple(tuple(distinct[number] for number in of_type) for of_type in answer.pop("policies"))
    return Solution(policies=policies, held=tuple(answer.pop("held")), **answer)


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    try:
        solution = solve_per_block(_heard(question["problem"]), question["budget"], max_seconds=question["max_seconds"])
    except InfeasibleBudget as error:
        return {"infeasible": (error.budget, error.smallest, error.proven)}
    except NoSolutionInTime as error:
        return {"no_solution": str(error)}
    distinct = list(dict.fromkeys(policy for of_type in solution.policies for policy in of_type))
    numbers = [[distinct.index(policy) for policy in of_type] for of_type in solution.policies]
    return {**asdict(solution), "policies": numbers, "distinct": [policy.to_json() for policy in distinct]}


if __name__ == "__main__":
    print(json.dumps(_answer(json.load(sys.stdin))))
