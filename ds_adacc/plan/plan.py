"""What there is to plan for, and the plan: policies for all block types under one budget (bytes)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ds_adacc import planner
from ds_adacc.plan.live_sets import Alive, Component, LiveSet, Orders, TypePolicies


@dataclass(frozen=True)
class PlanRequest:
    """What there is to plan for: block types by name, the live sets, and the orders known of them.

    `passes`: how many calls of each block type some passes had alive. The count of a block type is the most of any.
    """

    block_types: Mapping[str, planner.BlockType]
    live_sets: Sequence[LiveSet]
    orders: Orders = field(default_factory=dict)
    max_gradient_error: float | None = None
    passes: Sequence[Alive] = ()

    def problem(self, names: Collection[str]) -> planner.Problem:
        """The planner's problem of these block types, as if all were alive at once."""
        members = tuple(self.block_types[name] for name in sorted(names))
        return planner.Problem(members, self._order(members), self.max_gradient_error)

    def peak_without(self, known: planner.Simulations | None = None) -> int:
        """Peak bytes without checkpointing, of the pass that takes the most. `known`: as in `peak_bytes`.

        A live set of which no pass is known counts as if all its block types had the most calls in one pass.
        """
        met = {frozenset(alive) for alive in self.passes}
        ran = [self._pass(alive) for alive in self.passes if any(alive.keys() <= names for names in self.live_sets)]
        return max(
            planner.peak_without(one, known)
            for one in (*ran, *(self.problem(names) for names in self.live_sets if names not in met))
        )

    def _pass(self, alive: Alive) -> planner.Problem:
        """A pass as a problem. Without checkpointing all calls retain alike, whichever block they are of."""
        if all(self.block_types[name].count == calls for name, calls in alive.items()):
            return self.problem(alive)
        given = ((self.block_types[name], max(calls, 1)) for name, calls in sorted(alive.items()))
        return planner.Problem(
            tuple(replace(each, count=calls, calls_per_block=1, strictness=()) for each, calls in given)
        )

    def _order(self, block_types: Sequence[planner.BlockType]) -> tuple[str, ...]:
        """The order in which one forward runs these blocks, if each runs once and there are no others.

        () too where backward keeps what they store: it takes them in reverse, but frees nothing.
        """
        names = frozenset(block_type.name for block_type in block_types)
        # in another live set the same blocks may run in another order, but each has one policy for both
        if any(names & other and names != other for other in self.live_sets):
            return ()
        order = self.orders.get(names, ())
        fits = all(
            block_type.calls_per_block == 1
            and order.count(block_type.name) == block_type.blocks
            and block_type.profile.graph.frees_stored
            for block_type in block_types
        )
        return order if fits else ()


@dataclass(frozen=True)
class Group(Component):
    """Live sets that hang together, and the solution for all their block types.

    Of a single live set, `problem` is the one that was solved. In the solution, `peak` is that of the live set that
    takes the most. `shortfall` says why the budget may be broken.
    """

    solution: planner.Solution
    shortfall: str = ""

    @property
    def held(self) -> int:
        """Bytes that all calls of the largest live set hold between forward and backward."""
        each = {block_type.name: held for block_type, held in zip(self.block_types, self.solution.held, strict=True)}
        return max(sum(each[name] for name in names) for names in self.live_sets)

    @property
    def cached(self) -> int:
        """Bytes that caches hold besides in forward (`planner.cached_bytes`), of the largest live set."""
        return max(planner.cached_bytes(*each) for each in self.by_live_set(self.solution.policies))

    @property
    def added_seconds(self) -> float:
        """What the policies add to one forward and backward of the slowest live set."""
        return self.seconds_of(self.solution.policies)

    def unfit(self, budget: int) -> list[LiveSet]:
        """The live sets whose predicted peak is above so many bytes."""
        each = zip(self.live_sets, self.by_live_set(self.solution.policies), strict=True)
        return [names for names, (one, chosen) in each if planner.peak_bytes(one, chosen) > budget]


@dataclass(frozen=True)
class Plan:
    """The result of planning, the same on every rank.

    `budget` and `without` (the peak without checkpointing) are in bytes. `solve_seconds`: what the search for it took.
    """

    groups: tuple[Group, ...]
    budget: int
    without: int
    reason: str
    baselines: tuple[planner.Baseline, ...] = ()
    solve_seconds: float = 0.0

    @property
    def policies(self) -> dict[str, TypePolicies]:
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
        """Bytes held between forward and backward by the live set that holds the most."""
        return max(group.held for group in self.groups)

    @property
    def cached(self) -> int:
        """Bytes that caches hold besides in forward, by the live set of which they hold the most."""
        return max(group.cached for group in self.groups)

    @property
    def added_seconds(self) -> float:
        """What the policies add to one forward and backward of the slowest live set."""
        return max(group.added_seconds for group in self.groups)

    @property
    def proven_optimal(self) -> bool:
        return all(group.solution.proven_optimal for group in self.groups)
