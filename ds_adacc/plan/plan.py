"""Policies for block types under a budget: block types that are alive together share it, others have it whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ds_adacc import planner
from ds_adacc.config import AdaccConfig

LiveSet = frozenset[str]  # the names of block types whose calls are alive at once
Orders = Mapping[LiveSet, tuple[str, ...]]  # the block type of each block in forward order, where backward reverses it
Policies = tuple[planner.Policy, ...]  # of a block type's blocks, in forward order

_BASELINE_SECONDS = 1.0


@dataclass(frozen=True)
class PlanRequest:
    """What there is to plan for: block types by name, the sets of them alive together, and the orders known."""

    block_types: Mapping[str, planner.BlockType]
    live_sets: Sequence[LiveSet]
    orders: Orders = field(default_factory=dict)
    max_gradient_error: float | None = None

    def problem(self, names: Collection[str]) -> planner.Problem:
        """The planner's problem of these block types, which hang together."""
        sets = tuple(s for s in self.live_sets if s <= set(names))
        members = tuple(self.block_types[name] for name in sorted(names))
        order = self._order(members) if len(sets) <= 1 else ()
        return planner.Problem(members, sets if len(sets) > 1 else (), order, self.max_gradient_error)

    def _order(self, block_types: Sequence[planner.BlockType]) -> tuple[str, ...]:
        """The order in which one forward runs these blocks, if each runs once and there are no others."""
        order = self.orders.get(frozenset(block_type.name for block_type in block_types), ())
        fits = all(
            block_type.calls_per_block == 1 and order.count(block_type.name) == block_type.blocks
            for block_type in block_types
        )
        return order if fits else ()


@dataclass(frozen=True)
class Group:
    """Block types that hang together, as some sets of them are alive together, and the solution for all of them.

    `shortfall` says why the budget may not be kept.
    """

    problem: planner.Problem
    live_sets: tuple[LiveSet, ...]
    solution: planner.Solution
    shortfall: str = ""

    @property
    def block_types(self) -> tuple[planner.BlockType, ...]:
        return self.problem.block_types

    @property
    def held(self) -> int:
        """Bytes that all calls of the largest set hold between forward and backward."""
        each = {block_type.name: held for block_type, held in zip(self.block_types, self.solution.held, strict=True)}
        return max(sum(each[name] for name in names) for names in self.live_sets)

    @property
    def added_seconds(self) -> float:
        """What the choices add to one forward and backward of the slowest set."""
        return slowest(self.problem, self.live_sets, self.solution)

    def unfit(self, budget: int) -> list[LiveSet]:
        """The sets whose predicted peak is above so many bytes."""
        pairs = {k.name: (k, chosen) for k, chosen in zip(self.block_types, self.solution.policies, strict=True)}
        return [names for names in self.live_sets if _peak([pairs[name] for name in sorted(names)]) > budget]


@dataclass(frozen=True)
class Baseline:
    """What a planner of another block type would have cost, within the budget or not."""

    name: str
    peak: int
    added_seconds: float
    fits: bool


@dataclass(frozen=True)
class Plan:
    """What one planning gave, the same on every rank.

    `budget` and `without` (the peak without checkpointing) are in bytes.
    """

    groups: tuple[Group, ...]
    budget: int
    without: int
    reason: str
    baselines: tuple[Baseline, ...] = ()

    @property
    def policies(self) -> dict[str, Policies]:
        """By the name of the block type."""
        pairs = [zip(group.block_types, group.solution.policies, strict=True) for group in self.groups]
        return {block_type.name: chosen for of_group in pairs for block_type, chosen in of_group}

    @property
    def block_types(self) -> tuple[planner.BlockType, ...]:
        return tuple(block_type for group in self.groups for block_type in group.block_types)

    @property
    def peak(self) -> int:
        """Predicted peak bytes."""
        return max(group.solution.peak for group in self.groups)

    @property
    def held(self) -> int:
        """Bytes held between forward and backward, where they are most."""
        return max(group.held for group in self.groups)

    @property
    def added_seconds(self) -> float:
        """What the choices add to one forward and backward of the slowest set."""
        return max(group.added_seconds for group in self.groups)

    @property
    def solve_seconds(self) -> float:
        return sum(group.solution.solve_seconds for group in self.groups)

    @property
    def proven_optimal(self) -> bool:
        return all(group.solution.proven_optimal for group in self.groups)


def decide(
    request: PlanRequest,
    budget: int,
    config: AdaccConfig,
    settled: Mapping[str, Policies],
    forgiven: tuple[type[Exception], ...],
) -> tuple[Group, ...]:
    """Solve for each group of block types that hang together. The budget is in bytes.

    Policies `settled` before stay where new ones would gain less than measured seconds scatter. Raises
    planner.InfeasibleBudget, with a budget that all groups would fit, and planner.NoSolutionInTime. Where they are
    among the `forgiven`, the group's policies are those settled before; a block type that has none, or one whose codecs
    are on offer no more, is recomputed. Where all have one and nothing fits, as after a correction, the policies that
    take least come into force, unless more sets of block types break the budget by them.
    """
    groups: list[Group] = []
    unfit: list[planner.InfeasibleBudget] = []
    for names in components(request.live_sets):
        problem, sets = request.problem(names), tuple(s for s in request.live_sets if s <= names)
        try:
            solution = _incumbent(problem, settled, budget, _solve(problem, budget, config))
            group = Group(problem, sets, solution)
        except planner.InfeasibleBudget as error:
            unfit.append(error)
            group = Group(problem, sets, _settle(problem, settled), str(error))
            if planner.InfeasibleBudget in forgiven and _are_possible(settled, problem):
                group = _least(group, error.smallest, budget, config)
        except planner.NoSolutionInTime as error:
            if planner.NoSolutionInTime not in forgiven:
                raise
            group = Group(problem, sets, _settle(problem, settled), f"adacc.solver.max_seconds: {error}")
        groups.append(group)
    if unfit and planner.InfeasibleBudget not in forgiven:
        raise max(unfit, key=lambda error: error.smallest)
    return tuple(groups)


def compare(groups: Sequence[Group], budget: int) -> tuple[Baseline, ...]:
    """What the planners without a MILP solver would have cost under the same budget."""
    planners = {
        "retain all": planner.retain_all,
        "recompute all": planner.recompute_all,
        "compress all": planner.compress_all,
        "greedy": planner.greedy,
    }
    return tuple(_baseline(name, plan, groups, budget) for name, plan in planners.items())


def most_without(request: PlanRequest) -> int:
    """Peak bytes without checkpointing, of the set that takes the most."""
    return max(peak_when(planner.retain_policy, request.problem(names)) for names in components(request.live_sets))


def peak_when(plan: Callable[[planner.Profile], planner.Policy], problem: planner.Problem) -> int:
    """Peak bytes if every block's policy is what `plan` makes of its profile."""
    policies = [plan(block_type.profile) for block_type in problem.block_types]
    return planner.evaluate_uniform(problem, policies, time.perf_counter(), proven_optimal=False).peak


def slowest(problem: planner.Problem, live_sets: Iterable[LiveSet], solution: planner.Solution) -> float:
    """Seconds added to one forward and backward of the set to which they add the most."""
    pairs = zip(problem.block_types, solution.policies, strict=True)
    each = {
        block_type.name: planner.added_seconds(planner.Problem((block_type,)), (chosen,))
        for block_type, chosen in pairs
    }
    return max(sum(each[name] for name in names) for names in live_sets)


def components(live_sets: Iterable[Collection[str]]) -> list[LiveSet]:
    """The names that hang together, as sets that overlap do, in order."""
    apart: list[LiveSet] = []
    for names in live_sets:
        overlapping = [known for known in apart if known & set(names)]
        apart = [known for known in apart if known not in overlapping] + [frozenset(names).union(*overlapping)]
    return sorted(apart, key=sorted)


def largest(live_sets: Iterable[LiveSet]) -> tuple[LiveSet, ...]:
    """The sets that are part of no other, in order."""
    distinct = set(live_sets) - {frozenset()}
    return tuple(sorted((s for s in distinct if not any(s < other for other in distinct)), key=sorted))


def _solve(problem: planner.Problem, budget: int, config: AdaccConfig) -> planner.Solution:
    solver = planner.compress_all if config.forces_compression else planner.solve_in_process
    return solver(problem, budget, max_seconds=config.solver.max_seconds)


def _incumbent(
    problem: planner.Problem, settled: Mapping[str, Policies], budget: int, new: planner.Solution
) -> planner.Solution:
    """The new solution, or what is in force if that still fits and would gain nothing that can be measured."""
    if not _are_possible(settled, problem):
        return new
    policies = [settled[block_type.name] for block_type in problem.block_types]
    old = planner.evaluate_per_block(problem, policies, time.perf_counter() - new.solve_seconds, new.proven_optimal)
    noise = max(block_type.profile.noise for block_type in problem.block_types) * old.added_seconds
    return old if old.peak <= budget and old.added_seconds - new.added_seconds <= noise else new


def _settle(problem: planner.Problem, settled: Mapping[str, Policies]) -> planner.Solution:
    policies = [
        settled[block_type.name]
        if _is_possible(settled.get(block_type.name, ()), block_type)
        else (planner.recompute_policy(block_type.profile),) * block_type.blocks
        for block_type in problem.block_types
    ]
    return planner.evaluate_per_block(problem, policies, time.perf_counter(), proven_optimal=False)


def _least(group: Group, smallest: int, budget: int, config: AdaccConfig) -> Group:
    """The group with policies that fit `smallest` bytes, if they take less and break the budget for no more sets."""
    try:
        least = replace(group, solution=_solve(group.problem, smallest, config))
    except (planner.InfeasibleBudget, planner.NoSolutionInTime):  # the smallest found was not proven
        return group
    is_worse = not set(least.unfit(budget)) <= set(group.unfit(budget)) or least.solution.peak >= group.solution.peak
    return group if is_worse else least


def _are_possible(settled: Mapping[str, Policies], problem: planner.Problem) -> bool:
    return all(_is_possible(settled.get(block_type.name, ()), block_type) for block_type in problem.block_types)


def _is_possible(policies: Policies, block_type: planner.BlockType) -> bool:
    """Whether there is a policy for each block, with codecs that are still on offer."""
    offers = [{planner.RETAIN, None, *(cost.codec for cost in costs)} for costs in block_type.profile.codecs]
    return len(policies) == block_type.blocks and all(
        store in names for policy in set(policies) for store, names in zip(policy.stores, offers, strict=True)
    )


def _peak(pairs: Sequence[tuple[planner.BlockType, Policies]]) -> int:
    problem = planner.Problem(tuple(block_type for block_type, _ in pairs))
    return planner.peak_bytes(problem, [chosen for _, chosen in pairs])


def _baseline(name: str, plan: Callable[..., planner.Solution], groups: Sequence[Group], budget: int) -> Baseline:
    solutions = [_would_be(plan, group.problem, budget) for group in groups]
    peak = max(solution.peak for solution in solutions)
    seconds = max(slowest(g.problem, g.live_sets, solution) for g, solution in zip(groups, solutions, strict=True))
    return Baseline(name, peak, seconds, peak <= budget)


def _would_be(plan: Callable[..., planner.Solution], problem: planner.Problem, budget: int) -> planner.Solution:
    """The planner's solution; the one that it refuses, if the budget is too small for it."""
    try:
        return plan(problem, budget, max_seconds=_BASELINE_SECONDS)
    except planner.InfeasibleBudget as error:
        return plan(problem, error.smallest, max_seconds=_BASELINE_SECONDS)
