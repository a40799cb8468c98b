"""The block types met so far and the policies chosen for them, the same on every rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ds_adacc import planner
from ds_adacc.config import AdaccConfig
from ds_adacc.execute.bound_policy import rows
from ds_adacc.execute.input_placement import InputPlacement
from ds_adacc.kernels import separates_outliers
from ds_adacc.log import get_logger
from ds_adacc.plan.block_type import BlockType
from ds_adacc.plan.budget import available_bytes, budget_bytes
from ds_adacc.plan.consensus import Row, Terms, merge_block_type, merge_orders, merge_profiles, merge_terms
from ds_adacc.plan.plan import (
    LiveSet,
    Orders,
    Plan,
    PlanRequest,
    Policies,
    compare,
    components,
    largest,
    most_without,
    peak_when,
    solve,
)
from ds_adacc.plan.ranks import Ranks
from ds_adacc.profile.measure import CodecMaker
from ds_adacc.record.recording import Recording
from ds_adacc.rectify.observer import Pass

_UNLIMITED = 1 << 62
_REMEMBERED = 256  # block types whose policies stand for when they come back


@dataclass(frozen=True)
class Agreed:
    """What the ranks have agreed on for a block type."""

    block_type: planner.BlockType
    policies: Policies
    terms: Terms


@dataclass(frozen=True)
class CoordinatorState:
    """The fields of a `Coordinator` that outlive the process; `limit` is in bytes."""

    limit: int | None = None
    live_sets: tuple[LiveSet, ...] = ()
    unfit: tuple[LiveSet, ...] = ()
    orders: tuple[tuple[LiveSet, tuple[str, ...]], ...] = ()
    agreed: tuple[Agreed, ...] = ()

    def check(self) -> None:
        """Raise ValueError unless every policy can be carried out."""
        for agreed in self.agreed:
            for policy in set(agreed.policies):
                policy.check(agreed.block_type.profile)


class Coordinator:
    """Decides policies together with the other ranks.

    Ranks meet only in `decide`, which all of them call in the same step; the first solves for what any of them has
    measured. A policy for a block type that this rank has yet to meet is kept for when it does. `inputs` is how block
    inputs that a policy retains are held, the same on all ranks.
    """

    def __init__(self, config: AdaccConfig, codecs: CodecMaker, ranks: Ranks) -> None:
        self.block_types: dict[str, BlockType] = {}
        self.inputs = InputPlacement()
        self._config = config
        self._codecs = codecs
        self._ranks = ranks
        self._limit: int | None = None
        self._live_sets: tuple[LiveSet, ...] = ()
        self._unfit: tuple[LiveSet, ...] = ()
        self._orders: Orders = {}
        self._agreed: dict[str, Agreed] = {}

    def state(self) -> CoordinatorState:
        """What has been agreed on."""
        orders, agreed = tuple(self._orders.items()), tuple(self._agreed.values())
        return CoordinatorState(self._limit, self._live_sets, self._unfit, orders, agreed)

    def restore(self, state: CoordinatorState) -> None:
        """Put in force what had been agreed on then, and forget all block types: they come back with their blocks."""
        self.block_types = {}
        self._limit, self._live_sets, self._unfit = state.limit, state.live_sets, state.unfit
        self._orders = dict(state.orders)
        self._agreed = {agreed.block_type.name: agreed for agreed in state.agreed}

    def add(self, digest: str, recording: Recording, profile: planner.Profile) -> BlockType:
        """A new block type, with the policies that were agreed on other ranks' word if there are any."""
        block_type = self.block_types[digest] = BlockType(recording, profile)
        if digest in self._agreed:
            agreed = self._agreed[digest]
            block_type.agreed, block_type.policies = agreed.block_type, agreed.policies
            block_type.capacity, block_type.correction = agreed.terms.capacity, agreed.terms.correction
            block_type.count, block_type.calls_per_block = block_type.agreed.count, block_type.agreed.calls_per_block
        return block_type

    def arrange(self, seen: Pass) -> None:
        """Learn from one forward and backward in what order the blocks run, and give each its place."""
        block_types = frozenset(block_type for block_type, _ in seen.calls) & self.block_types.keys()
        self._orders = {**self._orders, frozenset(block_types): seen.order}
        for digest in block_types:
            self.block_types[digest].calls_per_block = seen.calls_per_block(digest)
            for place, block in enumerate(seen.blocks(digest)):
                for record in block.records():
                    if record.block_type == digest:
                        record.place = place

    def keep(self, digests: Collection[str]) -> None:
        """Forget the block types of all other blocks; a policy once agreed still stands for when they come back."""
        self.block_types = {digest: block_type for digest, block_type in self.block_types.items() if digest in digests}

    @property
    def undecided(self) -> tuple[str, ...]:
        return tuple(digest for digest, block_type in self.block_types.items() if block_type.policies is None)

    def decide(
        self, live_sets: Collection[LiveSet], device: torch.device | None, reason: str, must_fit: bool = True
    ) -> Plan:
        """Agree on policies for the block types named, and those that hang together with them, and put them in force.

        Every rank must call, with what is `live_sets` on it. A budget that is a fraction or "auto" is taken at the
        first decision, and stands from then on, in bytes. On a rank that has run no block yet `device` is None: others'
        memory decides. All raise what the first rank raises: planner.InfeasibleBudget, and from the second decision on
        planner.NoSolutionInTime, on every rank. With `must_fit` false neither is raised: policies in force then stay,
        and what has none is recomputed, with a warning.
        """
        new = {names for sets in self._ranks.gather(list(live_sets)) for names in sets}
        known = largest((*self._live_sets, *new))
        touched = {name for names in components(known) if any(names & s for s in new) for name in names}
        rows_of_types = {digest: self._row(digest) for digest in sorted(touched & self.block_types.keys())}
        available = None if device is None else available_bytes(device, self._recomputed(known))
        told = self._ranks.gather((rows_of_types, self._orders, available))
        everyone, orders, free = zip(*told, strict=True)
        present = frozenset(digest for given in everyone for digest in given)
        sets = largest(names & present for names in known)
        self._orders = merge_orders(orders)
        room = min(nbytes for nbytes in free if nbytes is not None)
        plan, terms = self._ranks.on_first(lambda: self._attempt(everyone, sets, room, reason, must_fit))
        for group in plan.groups:
            if group.solution.out_of_time:
                limit = self._config.solver.max_seconds
                text = "adacc.solver.max_seconds = %s: no plan was found in that time; a greedy one is in force"
                get_logger().warning(text, limit)
            if group.shortfall:
                text = "nothing fits; what had no policy yet is recomputed if possible, with a planned peak of %s: %s"
                get_logger().warning(text, planner.human_bytes(group.solution.peak), group.shortfall)
        self._limit = plan.budget if self._limit is None else self._limit
        self._put_in_force(plan, terms)
        self._remember((*(names for names in known if not names & touched), *sets), plan)
        return plan

    def _remember(self, live_sets: Iterable[LiveSet], plan: Plan) -> None:
        """Keep the sets to be planned for from now on: not those that nothing fits, which would spoil the others."""
        unfit = {names for group in plan.groups if group.shortfall for names in group.unfit(plan.budget)}
        live = frozenset(self._agreed)
        self._unfit = largest(names for names in (*self._unfit, *unfit) if names <= live)
        self._live_sets = largest(names & live for names in set(live_sets) - unfit)

    def _put_in_force(self, plan: Plan, terms: Mapping[str, Terms]) -> None:
        policies = plan.policies
        for block_type in plan.block_types:
            chosen, term = policies[block_type.name], terms[block_type.name]
            self._agreed.pop(block_type.name, None)
            self._agreed[block_type.name] = Agreed(block_type, chosen, term)
            if block_type.name in self.block_types:
                known = self.block_types[block_type.name]
                known.agreed, known.policies = block_type, chosen
                known.capacity, known.correction = term.capacity, term.correction
        for oldest in list(self._agreed)[:-_REMEMBERED]:
            del self._agreed[oldest]
        self._orders = {names: order for names, order in self._orders.items() if names <= self._agreed.keys()}

    def is_planned(self, names: LiveSet) -> bool:
        """Whether these block types have been planned for together, or keep the budget together as it is."""
        block_types = [self.block_types[name] for name in names]
        if any(block_type.policies is None for block_type in block_types):
            return False
        if any(names <= known for known in (*self._live_sets, *self._unfit)):
            return True
        problem = planner.Problem(tuple(block_type.agreed for block_type in block_types))
        peak = planner.peak_bytes(problem, [block_type.policies for block_type in block_types])
        return self._limit is not None and peak <= self._limit

    def partners(self, digests: Sequence[str]) -> list[LiveSet]:
        """The live sets that share a block type with these, the same on all ranks; none for what fits nowhere."""
        lost = frozenset().union(*self._unfit) - frozenset().union(*self._live_sets)
        digests = [digest for digest in digests if digest not in lost]
        sets = (*self._live_sets, *(frozenset((digest,)) for digest in digests))
        reached = [names for names in components(sets) if not names.isdisjoint(digests)]
        return [names for names in largest(sets) if any(names <= component for component in reached)]

    def held_bytes(self, calls: Mapping[tuple[str, int | None], int]) -> int:
        """Bytes that so many calls of the block at each place of a block type hold by the policies in force."""
        return sum(count * self.block_types[digest].held_bytes(place) for (digest, place), count in calls.items())

    def outlier_bytes(self, name: str, block_type: BlockType, index: int, capacity: int) -> int:
        """Bytes of an outlier codec's payload for a value when so many channels are kept raw."""
        value = block_type.recording.values[index]
        codec = self._codecs.make(name, torch.device("cpu"), torch.zeros(capacity, dtype=torch.long))
        return codec.payload_bytes(torch.Size(rows(value)), value.geometry.dtype)

    def _row(self, digest: str) -> Row:
        block_type = self.block_types[digest]
        return Row(
            self._counted(block_type),
            block_type.count,
            block_type.calls_per_block,
            block_type.capacity,
            block_type.correction,
        )

    def _counted(self, block_type: BlockType) -> planner.Profile:
        return self.inputs.counted(block_type.profile, block_type.recording)

    def _recomputed(self, live_sets: Iterable[LiveSet]) -> int:
        """Predicted peak bytes of this rank's blocks when all that can be is recomputed."""
        own = {
            digest: planner.BlockType(digest, self._counted(block_type), block_type.count)
            for digest, block_type in self.block_types.items()
        }
        sets = [tuple(own[name] for name in sorted(names & own.keys())) for names in live_sets]
        return max(
            (peak_when(planner.recompute_policy, planner.Problem(block_types)) for block_types in sets if block_types),
            default=0,
        )

    def _attempt(
        self,
        everyone: Sequence[Mapping[str, Row]],
        live_sets: Sequence[LiveSet],
        available: int,
        reason: str,
        must_fit: bool,
    ) -> tuple[Plan, dict[str, Terms]]:
        """The decision, and the terms agreed."""
        block_types, terms = self._merge(everyone)
        request = PlanRequest(block_types, live_sets, self._orders, self._config.max_gradient_error)
        without = most_without(request)
        budget = self._budget(without, available)
        forgiven: tuple[type[Exception], ...] = (planner.InfeasibleBudget, planner.NoSolutionInTime)
        if must_fit:
            forgiven = (planner.NoSolutionInTime,) if self._limit is None else ()
        settled = {digest: agreed.policies for digest, agreed in self._agreed.items()}
        groups = solve(request, budget, self._config, settled, forgiven)
        return Plan(groups, budget, without, reason, compare(groups, budget)), terms

    def _budget(self, without: int, available: int) -> int:
        if self._config.forces_compression and self._config.memory_budget.kind == "auto":
            return _UNLIMITED
        return self._limit if self._limit is not None else budget_bytes(self._config.memory_budget, without, available)

    def _merge(self, everyone: Sequence[Mapping[str, Row]]) -> tuple[dict[str, planner.BlockType], dict[str, Terms]]:
        """The ranks' block types as the planner sees them, and the terms, by digest."""
        block_types, terms = {}, {}
        for digest in sorted({digest for known in everyone for digest in known}):
            given = [known[digest] for known in everyone if digest in known]
            terms[digest] = merge_terms(given)
            profile = self._resize(digest, merge_profiles(given), terms[digest].capacity)
            block_types[digest] = merge_block_type(digest, terms[digest].correction.of(profile), given)
        return block_types, terms

    def _resize(self, digest: str, profile: planner.Profile, capacity: Mapping[int, int]) -> planner.Profile:
        """The profile with the outlier codecs' payloads at the capacities agreed."""
        if digest not in self.block_types:
            return profile
        block_type = self.block_types[digest]
        codecs = list(profile.codecs)
        for index, channels in capacity.items():
            names = [cost.codec for cost in codecs[index] if separates_outliers(cost.codec)]
            sizes = {name: self.outlier_bytes(name, block_type, index, channels) for name in names}
            codecs[index] = tuple(replace(cost, nbytes=sizes.get(cost.codec, cost.nbytes)) for cost in codecs[index])
        return replace(profile, codecs=tuple(codecs))
