"""Policies for kinds of blocks under a budget: kinds that are alive together share it, others have it whole."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ds_adacc import planner
from ds_adacc.budget import peak_without
from ds_adacc.config import AdaccConfig

Together = frozenset[str]  # the names of kinds whose calls are alive at once


@dataclass(frozen=True)
class Group:
    """Kinds that hang together, as some sets of them are alive together, and the solution for all of them.

    `shortfall` says why the budget may not be kept.
    """

    kinds: tuple[planner.Kind, ...]
    together: tuple[Together, ...]
    solution: planner.Solution
    shortfall: str = ""

    @property
    def held(self) -> int:
        """Bytes that all calls of the largest set hold between forward and backward."""
        each = {k.name: k.count * held for k, held in zip(self.kinds, self.solution.held, strict=True)}
        return max(sum(each[name] for name in names) for names in self.together)

    @property
    def added_seconds(self) -> float:
        """What the choices add to one forward and backward of the slowest set."""
        pairs = zip(self.kinds, self.solution.policies, strict=True)
        each = {kind.name: planner.added_seconds([kind], [policy]) for kind, policy in pairs}
        return max(sum(each[name] for name in names) for names in self.together)

    def unfit(self, budget: int) -> list[Together]:
        """The sets whose predicted peak is above so many bytes."""
        pairs = {k.name: (k, policy) for k, policy in zip(self.kinds, self.solution.policies, strict=True)}
        chosen = [(names, [pairs[name] for name in sorted(names)]) for names in self.together]
        return [names for names, of_set in chosen if planner.peak_bytes(*zip(*of_set, strict=True)) > budget]


@dataclass(frozen=True)
class Decision:
    """What one planning gave, the same on every rank.

    `budget` and `without` (the peak without checkpointing) are in bytes.
    """

    groups: tuple[Group, ...]
    budget: int
    without: int
    reason: str

    @property
    def policies(self) -> dict[str, planner.Policy]:
        """By the name of the kind."""
        pairs = [zip(group.kinds, group.solution.policies, strict=True) for group in self.groups]
        return {kind.name: policy for of_group in pairs for kind, policy in of_group}

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
    kinds: Mapping[str, planner.Kind],
    together: Sequence[Together],
    budget: int,
    config: AdaccConfig,
    settled: Mapping[str, planner.Policy],
    forgiven: tuple[type[Exception], ...],
) -> tuple[Group, ...]:
    """Solve for each group of kinds that hang together. `kinds` are by name, the budget is in bytes.

    Raises planner.InfeasibleBudget, with a budget that all groups would fit, and planner.NoSolutionInTime. Where they
    are among the `forgiven`, the group's policies are those `settled` before; a kind that has none, or one whose codecs
    are on offer no more, is recomputed.
    """
    groups: list[Group] = []
    unfit: list[planner.InfeasibleBudget] = []
    for names in components(together):
        members, sets = tuple(kinds[name] for name in sorted(names)), tuple(s for s in together if s <= names)
        shortfall = ""
        try:
            solution = _solve(members, sets, budget, config)
        except planner.InfeasibleBudget as error:
            unfit.append(error)
            shortfall = str(error)
        except planner.NoSolutionInTime as error:
            if planner.NoSolutionInTime not in forgiven:
                raise
            shortfall = f"adacc.solver.max_seconds: {error}"
        if shortfall:
            solution = _settle(members, sets, settled)
        groups.append(Group(members, sets, solution, shortfall))
    if unfit and planner.InfeasibleBudget not in forgiven:
        raise max(unfit, key=lambda error: error.smallest)
    return tuple(groups)


def most_without(kinds: Mapping[str, planner.Kind], together: Iterable[Together]) -> int:
    """Peak bytes without checkpointing, of the set that takes the most."""
    return max(peak_without([kinds[name] for name in names]) for names in together)


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


def _solve(
    kinds: Sequence[planner.Kind], together: Sequence[Together], budget: int, config: AdaccConfig
) -> planner.Solution:
    solver = planner.compress_all if config.forces_compression else planner.solve_isolated
    return solver(kinds, budget, max_seconds=config.solver.max_seconds, together=together)


def _settle(
    kinds: Sequence[planner.Kind], together: Sequence[Together], settled: Mapping[str, planner.Policy]
) -> planner.Solution:
    policies = [
        settled[kind.name]
        if kind.name in settled and _is_possible(settled[kind.name], kind.profile)
        else planner.recompute_policy(kind.profile)
        for kind in kinds
    ]
    return planner.evaluate(kinds, policies, time.perf_counter(), proven_optimal=False, together=together)


def _is_possible(policy: planner.Policy, profile: planner.Profile) -> bool:
    """Whether the codecs of the policy are still on offer."""
    offers = [{planner.RETAIN, None, *(cost.codec for cost in costs)} for costs in profile.codecs]
    return all(store in names for store, names in zip(policy.stores, offers, strict=True))
