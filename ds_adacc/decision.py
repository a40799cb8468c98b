"""Policies for kinds of blocks under a budget: kinds that run together share it, others have it whole."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ds_adacc import planner
from ds_adacc.budget import budget_bytes, peak_without
from ds_adacc.config import AdaccConfig

_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Group:
    """Kinds whose calls are alive together, with the solution for them."""

    kinds: tuple[planner.Kind, ...]
    solution: planner.Solution

    @property
    def held(self) -> int:
        """Bytes that all calls hold between forward and backward."""
        return sum(kind.count * nbytes for kind, nbytes in zip(self.kinds, self.solution.held, strict=True))


@dataclass(frozen=True)
class Decision:
    """What one planning gave, the same on every rank.

    `budget` and `without` (the peak without checkpointing) are in bytes, of whichever group takes the most; `shortfall`
    says why the budget is not kept.
    """

    groups: tuple[Group, ...]
    budget: int
    without: int
    reason: str
    shortfall: str = ""

    @property
    def policies(self) -> dict[str, planner.Policy]:
        """By the name of the kind."""
        pairs = ((kind, policy) for group in self.groups for kind, policy in _pairs(group))
        return {kind.name: policy for kind, policy in pairs}

    @property
    def kinds(self) -> tuple[planner.Kind, ...]:
        return tuple(kind for group in self.groups for kind in group.kinds)

    @property
    def peak(self) -> int:
        """Predicted peak bytes."""
        return max(group.solution.peak for group in self.groups)

    @property
    def held(self) -> int:
        """Bytes held between forward and backward."""
        return max(group.held for group in self.groups)

    @property
    def added_seconds(self) -> float:
        """What the choices add to a step."""
        return max(group.solution.added_seconds for group in self.groups)

    @property
    def solve_seconds(self) -> float:
        return sum(group.solution.solve_seconds for group in self.groups)

    @property
    def proven_optimal(self) -> bool:
        return all(group.solution.proven_optimal for group in self.groups)


def decide(
    kinds: Mapping[str, planner.Kind],
    groups: Iterable[Collection[str]],
    available: int,
    config: AdaccConfig,
    reason: str,
    standing: int | None,
    must_fit: bool,
) -> Decision:
    """Policies for these kinds, by name. `groups` names those that are alive together; groups that overlap are one.

    `standing`: the budget in bytes from an earlier decision, in place of the configured one. `available`: bytes that
    the device has. Raises planner.InfeasibleBudget with the smallest budget that all groups would fit, and
    planner.NoSolutionInTime where there is an earlier decision to stay with. With `must_fit` false neither is raised:
    all that can be is recomputed instead.
    """
    members = [tuple(kinds[name] for name in names) for names in joined(groups)]
    without = max(peak_without(group) for group in members)
    if config.forces_compression and config.memory_budget.kind == "auto":
        budget = _UNLIMITED
    else:
        budget = budget_bytes(config.memory_budget, without, available) if standing is None else standing
    solved: list[Group] = []
    unfit: list[planner.InfeasibleBudget] = []
    shortfall = ""
    for group in members:
        try:
            solved.append(Group(group, _solve(group, budget, config)))
            continue
        except planner.InfeasibleBudget as error:
            unfit.append(error)
            shortfall = str(error)
        except planner.NoSolutionInTime as error:
            if must_fit and standing is not None:
                raise
            shortfall = f"adacc.solver.max_seconds: {error}"
        solved.append(Group(group, _recompute(group, config)))
    if unfit and must_fit:
        raise max(unfit, key=lambda error: error.smallest)
    return Decision(tuple(solved), budget, without, reason, shortfall)


def joined(groups: Iterable[Collection[str]]) -> list[tuple[str, ...]]:
    """The groups with those that overlap made one, in order."""
    apart: list[set[str]] = []
    for group in groups:
        overlapping = [known for known in apart if known & set(group)]
        apart = [known for known in apart if known not in overlapping] + [set(group).union(*overlapping)]
    return sorted(tuple(sorted(names)) for names in apart if names)


def _pairs(group: Group) -> Iterable[tuple[planner.Kind, planner.Policy]]:
    return zip(group.kinds, group.solution.policies, strict=True)


def _solve(kinds: Sequence[planner.Kind], budget: int, config: AdaccConfig) -> planner.Solution:
    solver = planner.compress_all if config.forces_compression else planner.solve_isolated
    return solver(kinds, budget, max_seconds=config.solver.max_seconds)


def _recompute(kinds: Sequence[planner.Kind], config: AdaccConfig) -> planner.Solution:
    return planner.recompute_all(kinds, _UNLIMITED, max_seconds=config.solver.max_seconds)
