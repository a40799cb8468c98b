"""What simpler plans would take and cost: those of simple rules, and of the greedy planner."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from ds_adacc import planner
from ds_adacc.plan.plan import Group

RULES = {
    "retain all": planner.no_checkpointing,
    "recompute all": planner.recompute_policy,
    "compress all": planner.compress_policy,
}


def compare(groups: Sequence[Group], budget: int) -> tuple[planner.Baseline, ...]:
    """What simpler planners would have cost under the same budget.

    Where there is nothing to compress, compressing all is no plan of its own.
    """
    planners = {name: functools.partial(planner.everywhere, rule) for name, rule in RULES.items()}
    planners["greedy"] = functools.partial(planner.greedy, budget=budget)
    found = {name: _baseline(name, plan, groups, budget) for name, plan in planners.items()}
    if replace(found["compress all"], name="retain all") == found["retain all"]:
        del found["compress all"]
    return tuple(found.values())


def _baseline(
    name: str, plan: Callable[[planner.Problem], planner.Solution], groups: Sequence[Group], budget: int
) -> planner.Baseline:
    solutions = [group.stricter(plan, budget) for group in groups]
    peak = max(solution.peak for solution in solutions)
    seconds = max(group.seconds_of(each.policies) for group, each in zip(groups, solutions, strict=True))
    return planner.Baseline(name, peak, seconds, peak <= budget)
