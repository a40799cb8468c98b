"""What simpler plans would take and cost: those of other planners, and one policy for every block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ds_adacc import planner
from ds_adacc.plan.live_sets import slowest, stricter
from ds_adacc.plan.plan import Baseline, Group, PlanRequest

_BASELINE_SECONDS = 1.0


def compare(groups: Sequence[Group], budget: int) -> tuple[Baseline, ...]:
    """What simpler planners would have cost under the same budget.

    Where there is nothing to compress, compressing all is no plan of its own.
    """
    planners = {
        "retain all": planner.retain_all,
        "recompute all": planner.recompute_all,
        "compress all": planner.compress_all,
        "greedy": planner.greedy,
    }
    found = {name: _baseline(name, plan, groups, budget) for name, plan in planners.items()}
    if replace(found["compress all"], name="retain all") == found["retain all"]:
        del found["compress all"]
    return tuple(found.values())


def most_without(request: PlanRequest) -> int:
    """Peak bytes without checkpointing, of the live set that takes the most."""
    return max(peak_when(planner.retain_policy, request.problem(names)) for names in request.live_sets)


def peak_when(plan: Callable[[planner.Profile], planner.Policy], problem: planner.Problem) -> int:
    """Peak bytes if every block's policy is what `plan` makes of its profile."""
    policies = [plan(block_type.profile) for block_type in problem.block_types]
    return planner.evaluate_uniform(problem, policies).peak


def _baseline(name: str, plan: Callable[..., planner.Solution], groups: Sequence[Group], budget: int) -> Baseline:
    solutions = [
        stricter(lambda one: _would_be(plan, one, budget), group.problem, group.live_sets, budget) for group in groups
    ]
    peak = max(solution.peak for solution in solutions)
    seconds = max(slowest(g.problem, g.live_sets, solution) for g, solution in zip(groups, solutions, strict=True))
    return Baseline(name, peak, seconds, peak <= budget)


def _would_be(plan: Callable[..., planner.Solution], problem: planner.Problem, budget: int) -> planner.Solution:
    """The planner's solution; the one that it refuses, if the budget is too small for it."""
    try:
        return plan(problem, budget, max_seconds=_BASELINE_SECONDS)
    except planner.InfeasibleBudget as error:
        return plan(problem, error.smallest, max_seconds=_BASELINE_SECONDS)
