"""Policies for kinds of blocks under a budget: kinds that are alive together share it, others have it whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ds_adacc import planner
from ds_adacc.config import AdaccConfig

Together = frozenset[str]  # the names of kinds whose calls are alive at once
Orders = Mapping[Together, tuple[str, ...]]  # the kind of each block in forward order, where backward reverses it
Policies = tuple[planner.Policy, ...]  # of a kind's blocks, in forward order

_BASELINE_SECONDS = 1.0


@dataclass(frozen=True)
class Scene:
    """What there is to plan for: kinds by name, the sets of them alive together, and the orders known."""

    kinds: Mapping[str, planner.Kind]
    together: Sequence[Together]
    orders: Orders = field(default_factory=dict)
    max_gradient_error: float | None = None

    def problem(self, names: Collection[str]) -> planner.Problem:
        """The planner's problem of these kinds, which hang together."""
        sets = tuple(s for s in self.together if s <= set(names))
        members = tuple(self.kinds[name] for name in sorted(names))
        order = self._order(members) if len(sets) <= 1 else ()
        return planner.Problem(members, sets if len(sets) > 1 else (), order, self.max_gradient_error)

    def _order(self, kinds: Sequence[planner.Kind]) -> tuple[str, ...]:
        """The order in which one forward runs these blocks, if each runs once and there are no others."""
        order = self.orders.get(frozenset(kind.name for kind in kinds), ())
        fits = all(kind.calls_per_block == 1 and order.count(kind.name) == kind.blocks for kind in kinds)
        return order if fits else ()


@dataclass(frozen=True)
class Group:
    """Kinds that hang together, as some sets of them are alive together, and the solution for all of them.

    `shortfall` says why the budget may not be kept.
    """

    problem: planner.Problem
    together: tuple[Together, ...]
    solution: planner.Solution
    shortfall: str = ""

    @property
    def kinds(self) -> tuple[planner.Kind, ...]:
        return self.problem.kinds

    @property
    def held(self) -> int:
        """Bytes that all calls of the largest set hold between forward and backward."""
        each = {kind.name: held for kind, held in zip(self.kinds, self.solution.held, strict=True)}
        return max(sum(each[name] for name in names) for names in self.together)

    @property
    def added_seconds(self) -> float:
        """What the choices add to one forward and backward of the slowest set."""
        return slowest(self.problem, self.together, self.solution)

    def unfit(self, budget: int) -> list[Together]:
        """The sets whose predicted peak is above so many bytes."""
        pairs = {k.name: (k, chosen) for k, chosen in zip(self.kinds, self.solution.policies, strict=True)}
        return [names for names in self.together if _peak([pairs[name] for name in sorted(names)]) > budget]


@dataclass(frozen=True)
class Baseline:
    """What a planner of another kind would have cost, within the budget or not."""

    name: str
    peak: int
    added_seconds: float
    fits: bool


@dataclass(frozen=True)
class Decision:
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
        """By the name of the kind."""
        pairs = [zip(group.kinds, group.solution.policies, strict=True) for group in self.groups]
        return {kind.name: chosen for of_group in pairs for kind, chosen in of_group}

    @property
    def kinds(self) -> tuple[planner.Kind, ...]:
        return tuple(kind for group in self.groups for kind in group.kinds)

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
    scene: Scene,
    budget: int,
    config: AdaccConfig,
    settled: Mapping[str, Policies],
    forgiven: tuple[type[Exception], ...],
) -> tuple[Group, ...]:
    """Solve for each group of kinds that hang together. The budget is in bytes.

    Policies `settled` before stay where new ones would gain less than measured seconds scatter. Raises
    planner.InfeasibleBudget, with a budget that all groups would fit, and planner.NoSolutionInTime. Where they are
    among the `forgiven`, the group's policies are those settled before; a kind that has none, or one whose codecs are
    on offer no more, is recomputed. Where all have one and nothing fits, as after a correction, the policies that take
    least come into force, unless more sets of kinds break the budget by them.
    """
    groups: list[Group] = []
    unfit: list[planner.InfeasibleBudget] = []
    for names in components(scene.together):
        problem, sets = scene.problem(names), tuple(s for s in scene.together if s <= names)
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
        "dynamic programming": planner.dynamic_programming,
    }
    return tuple(_baseline(name, plan, groups, budget) for name, plan in planners.items())


def most_without(scene: Scene) -> int:
    """Peak bytes without checkpointing, of the set that takes the most."""
    return max(peak_when(planner.retain_policy, scene.problem(names)) for names in components(scene.together))


def peak_when(plan: Callable[[planner.Profile], planner.Policy], problem: planner.Problem) -> int:
    """Peak bytes if every block's policy is what `plan` makes of its profile."""
    policies = [plan(kind.profile) for kind in problem.kinds]
    return planner.evaluate(problem, policies, time.perf_counter(), proven_optimal=False).peak


def slowest(problem: planner.Problem, together: Iterable[Together], solution: planner.Solution) -> float:
    """Seconds added to one forward and backward of the set to which they add the most."""
    pairs = zip(problem.kinds, solution.policies, strict=True)
    each = {kind.name: planner.added_seconds(planner.Problem((kind,)), (chosen,)) for kind, chosen in pairs}
    return max(sum(each[name] for name in names) for names in together)


def components(together: Iterable[Collection[str]]) -> list[Together]:
    """The names that hang together, as sets that overlap do, in order."""
    apart: list[Together] = []
    for names in together:
        overlapping = [known for known in apart if known & set(names)]
        apart = [known for known in apart if known not in overlapping] + [frozenset(names).union(*overlapping)]
    return sorted(apart, key=sorted)


def largest(together: Iterable[Together]) -> tuple[Together, ...]:
    """The sets that are part of no other, in order."""
    distinct = set(together) - {frozenset()}
    return tuple(sorted((s for s in distinct if not any(s < other for other in distinct)), key=sorted))


def _solve(problem: planner.Problem, budget: int, config: AdaccConfig) -> planner.Solution:
    solver = planner.compress_all if config.forces_compression else planner.mix_isolated
    return solver(problem, budget, max_seconds=config.solver.max_seconds)


def _incumbent(
    problem: planner.Problem, settled: Mapping[str, Policies], budget: int, new: planner.Solution
) -> planner.Solution:
    """The new solution, or what is in force if that still fits and would gain nothing that can be measured."""
    if not _are_possible(settled, problem):
        return new
    policies = [settled[kind.name] for kind in problem.kinds]
    old = planner.evaluate_mix(problem, policies, time.perf_counter() - new.solve_seconds, new.proven_optimal)
    noise = max(kind.profile.noise for kind in problem.kinds) * old.added_seconds
    return old if old.peak <= budget and old.added_seconds - new.added_seconds <= noise else new


def _settle(problem: planner.Problem, settled: Mapping[str, Policies]) -> planner.Solution:
    policies = [
        settled[kind.name]
        if _is_possible(settled.get(kind.name, ()), kind)
        else (planner.recompute_policy(kind.profile),) * kind.blocks
        for kind in problem.kinds
    ]
    return planner.evaluate_mix(problem, policies, time.perf_counter(), proven_optimal=False)


def _least(group: Group, smallest: int, budget: int, config: AdaccConfig) -> Group:
    """The group with policies that fit `smallest` bytes, if they take less and break the budget for no more sets."""
    try:
        least = replace(group, solution=_solve(group.problem, smallest, config))
    except (planner.InfeasibleBudget, planner.NoSolutionInTime):  # the smallest found was not proven
        return group
    is_worse = not set(least.unfit(budget)) <= set(group.unfit(budget)) or least.solution.peak >= group.solution.peak
    return group if is_worse else least


def _are_possible(settled: Mapping[str, Policies], problem: planner.Problem) -> bool:
    return all(_is_possible(settled.get(kind.name, ()), kind) for kind in problem.kinds)


def _is_possible(policies: Policies, kind: planner.Kind) -> bool:
    """Whether there is a policy for each block, with codecs that are still on offer."""
    offers = [{planner.RETAIN, None, *(cost.codec for cost in costs)} for costs in kind.profile.codecs]
    return len(policies) == kind.blocks and all(
        store in names for policy in set(policies) for store, names in zip(policy.stores, offers, strict=True)
    )


def _peak(pairs: Sequence[tuple[planner.Kind, Policies]]) -> int:
    problem = planner.Problem(tuple(kind for kind, _ in pairs))
    return planner.peak_bytes(problem, [chosen for _, chosen in pairs])


def _baseline(name: str, plan: Callable[..., planner.Solution], groups: Sequence[Group], budget: int) -> Baseline:
    solutions = [_would_be(plan, group.problem, budget) for group in groups]
    peak = max(solution.peak for solution in solutions)
    seconds = max(slowest(g.problem, g.together, solution) for g, solution in zip(groups, solutions, strict=True))
    return Baseline(name, peak, seconds, peak <= budget)


def _would_be(plan: Callable[..., planner.Solution], problem: planner.Problem, budget: int) -> planner.Solution:
    """The planner's solution; the one that it refuses, if the budget is too small for it."""
    try:
        return plan(problem, budget, max_seconds=_BASELINE_SECONDS)
    except planner.InfeasibleBudget as error:
        return plan(problem, error.smallest, max_seconds=_BASELINE_SECONDS)
