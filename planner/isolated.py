"""`solve` in a child process.

CBC sets the OpenMP thread count of its process to one, which slows every later operator and changes the bits of
reductions; it installs handlers for SIGABRT, SIGFPE and SIGSEGV; and python-mip leaks about 34 KB a model. None of it
may reach the training process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ds_adacc.planner.milp import solve
from ds_adacc.planner.policy import Policy
from ds_adacc.planner.profile import Kind, Profile
from ds_adacc.planner.solution import InfeasibleBudget, NoSolutionInTime, Solution, check_budget, check_request
from ds_adacc.planner.together import Together, groups_of

_START_SECONDS = 60.0


def solve_isolated(kinds: Sequence[Kind], budget: int, *, max_seconds: float, together: Together = None) -> Solution:
    """As `solve`, and as reproducible, but in a process of its own (about 0.3 s to start).

    Raises what `solve` raises, and RuntimeError with the child's last words if it dies.
    """
    check_request(kinds, max_seconds)
    check_budget(budget)
    groups_of(kinds, together)
    rows = [{"name": kind.name, "profile": kind.profile.to_json(), "count": kind.count} for kind in kinds]
    sets = None if together is None else [sorted(names) for names in together]
    question = json.dumps({"kinds": rows, "budget": budget, "max_seconds": max_seconds, "together": sets})
    child = subprocess.run(
        [sys.executable, "-m", "ds_adacc.planner.isolated"],
        input=question,
        capture_output=True,
        text=True,
        timeout=_START_SECONDS + 10 * max_seconds,
    )
    if child.returncode != 0:
        raise RuntimeError(f"the solver's process ended with code {child.returncode}: {child.stderr.strip()[-2000:]}")
    return _read(json.loads(child.stdout.splitlines()[-1]))


def _read(answer: dict[str, Any]) -> Solution:
    if "infeasible" in answer:
        raise InfeasibleBudget(*answer["infeasible"])
    if "no_solution" in answer:
        raise NoSolutionInTime(answer["no_solution"])
    policies = tuple(Policy.from_json(policy) for policy in answer.pop("policies"))
    return Solution(policies=policies, held=tuple(answer.pop("held")), **answer)


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    kinds = [Kind(row["name"], Profile.from_json(row["profile"]), row["count"]) for row in question["kinds"]]
    try:
        request = {"max_seconds": question["max_seconds"], "together": question["together"]}
        return asdict(solve(kinds, question["budget"], **request))
    except InfeasibleBudget as error:
        return {"infeasible": (error.budget, error.smallest, error.proven)}
    except NoSolutionInTime as error:
        return {"no_solution": str(error)}


if __name__ == "__main__":
    print(json.dumps(_answer(json.load(sys.stdin))))
