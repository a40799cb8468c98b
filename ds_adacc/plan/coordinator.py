"""The block types recorded so far, and their policies, which are the same on every rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ds_adacc import planner
from ds_adacc.config import AdaccConfig
from ds_adacc.execute.block import Block
from ds_adacc.execute.bound_policy import rows
from ds_adacc.execute.input_placement import InputPlacement
from ds_adacc.kernels import separates_outliers
from ds_adacc.log import get_logger
from ds_adacc.plan.adoption import Adoption
from ds_adacc.plan.approvals import Approvals, BlockErrors, BlockKey, is_lossy
from ds_adacc.plan.block_type import AgreedType, KnownType
from ds_adacc.plan.budget import available_bytes, budget_bytes
from ds_adacc.plan.consensus import (
    RankReport,
    merge_block_type,
    merge_capacity,
    merge_corrections,
    merge_orders,
    merge_profiles,
)
from ds_adacc.plan.correction import Correction
from ds_adacc.plan.forward_order import ForwardOrder, ForwardPass
from ds_adacc.plan.held_inputs import with_held_inputs
from ds_adacc.plan.live_sets import Policies
from ds_adacc.plan.open_types import OpenTypes
from ds_adacc.plan.plan import (
    LiveSet,
    Orders,
    Plan,
    PlanRequest,
    compare,
    components,
    largest,
    most_without,
    peak_when,
    solve,
)
from ds_adacc.plan.ranks import Ranks
from ds_adacc.plan.refusal import explained
from ds_adacc.profile.codecs import CodecMaker
from ds_adacc.record.recording import Recording
from ds_adacc.record.sizes import Sizes, fits

_UNLIMITED = 1 << 62
_REMEMBERED = 256  # block types whose policies are kept in case they run again


@dataclass(frozen=True)
class CoordinatorState:
    """The part of a `Coordinator` that a checkpoint saves. `limit` is in bytes."""

    limit: int | None = None
    live_sets: tuple[LiveSet, ...] = ()
    unfit: tuple[LiveSet, ...] = ()
    orders: tuple[tuple[LiveSet, tuple[str, ...]], ...] = ()
    agreed: tuple[AgreedType, ...] = ()
    errors: tuple[tuple[BlockKey, BlockErrors], ...] = ()

    def check(self) -> None:
        """Raise ValueError unless every policy is valid for its block type."""
        for agreed in self.agreed:
            for policy in set(agreed.policies):
                policy.check(agreed.spec.profile)


@dataclass(frozen=True)
class PlanContext:
    """The ranks' agreed input of a planning.

    It holds the live sets, their orders, the `available` bytes, the reason, and whether the plan must fit the budget.
    """

    live_sets: Sequence[LiveSet]
    orders: Orders
    available: int
    reason: str
    must_fit: bool


class Coordinator:
    """Makes all ranks agree on policies, when the step controller calls for them.

    Ranks communicate only in `decide`, which all of them call in the same step. The first rank solves for the block
    types that any rank has measured. A policy for a block type that this rank has not run yet is kept until it runs.
    `inputs` says how the block inputs that a policy retains are held. It is the same on all ranks.
    """

    def __init__(self, config: AdaccConfig, codecs: CodecMaker, ranks: Ranks) -> None:
        self.block_types: dict[str, KnownType] = {}
        self.forward_order = ForwardOrder()
        self.inputs = InputPlacement()
        self._config = config
        self._codecs = codecs
        self._ranks = ranks
        self._limit: int | None = None
        self._live_sets: tuple[LiveSet, ...] = ()
        self._unfit: tuple[LiveSet, ...] = ()
        self._agreed: dict[str, AgreedType] = {}
        self.approvals = Approvals(config.max_gradient_error)
        self.open_types = OpenTypes()
        self._origins: dict[str, str] = {}  # of adopted block types: the type whose policies they run

    def state(self) -> CoordinatorState:
        """The state to save in a checkpoint."""
        orders = tuple(self.forward_order.orders.items())
        agreed = tuple(each for name, each in self._agreed.items() if name not in self._origins)
        errors = tuple(self.approvals.blocks.items())
        return CoordinatorState(self._limit, self._live_sets, self._unfit, orders, agreed, errors)

    def restore(self, state: CoordinatorState, blocks: Sequence[Block], indices: Sequence[Mapping[str, int]]) -> None:
        """Restore the agreed policies. Block types are forgotten; they are added again when their blocks run.

        `indices` holds, for each of `blocks`, what `ForwardOrder.indices` returned.
        """
        self.block_types, self._origins, self.open_types = {}, {}, OpenTypes()
        self._limit, self._live_sets, self._unfit = state.limit, state.live_sets, state.unfit
        self._agreed = {agreed.spec.name: agreed for agreed in state.agreed}
        self.approvals.blocks = dict(state.errors)
        self.forward_order.restore(dict(state.orders), blocks, indices)

    def add(self, digest: str, recording: Recording, profile: planner.Profile) -> KnownType:
        """Add a new block type. If the ranks have agreed on policies for it before, these are in force here too."""
        known = self.block_types[digest] = KnownType(recording.of_type(), profile)
        if digest in self._agreed:
            known.agreed = self._agreed[digest]
            known.count, known.calls_per_block = known.agreed.spec.count, known.agreed.spec.calls_per_block
        return known

    def arrange(self, seen: ForwardPass) -> None:
        """Learn from one forward and backward the order of the blocks, and how often each block is called."""
        self.forward_order.learn(seen, self.block_types.keys())
        for digest in seen.block_types & self.block_types.keys():
            self.block_types[digest].calls_per_block = seen.calls_per_block(digest)

    def count(self, digest: str, alive: int, blocks: int) -> None:
        """Set a block type's count from its calls observed `alive` at once, and from the number of its `blocks`.

        Before the first plan the whole step is observed, so `alive` is exact. Later a type may have run before the
        observation began. So the count is then at least the number of blocks, and it never decreases.
        """
        known = self.block_types[digest]
        is_first = self._limit is None and known.agreed is None
        known.count = alive if alive and is_first else max(known.count, alive, blocks)

    def agreed_policies(self, digests: Iterable[str]) -> dict[str, Policies]:
        """The policies in force on all ranks, by block type, including types that this rank has not run."""
        return {digest: self._agreed[digest].policies for digest in digests if digest in self._agreed}

    def permits(self, digest: str, index: int | None) -> bool:
        """Whether the block with this index may run its policy: the bound on the gradient error is known to hold."""
        agreed = self._agreed[digest]
        return self.approvals.permit((self.origin(digest), index), agreed.policy(index), agreed.spec.profile)

    def has_trials(self, plan: Plan) -> bool:
        """Whether a policy of the plan must be measured before it comes into force."""
        return not all(self._may_all_run(self._agreed[block_type.name]) for block_type in plan.block_types)

    def errors_in_force(self) -> dict[BlockKey, float]:
        """The measured gradient errors of the policies in force, by block."""
        return self.approvals.in_force(self._agreed.values())

    def is_lossy(self, block: Block, digest: str) -> bool:
        """Whether the policy in force for this block is lossy, where the section bounds its error."""
        agreed = self._agreed.get(digest)
        if agreed is None or self.approvals.bound is None:
            return False
        return is_lossy(agreed.policy(self.forward_order.index(block, digest)), agreed.spec.profile)

    def keep(self, digests: Collection[str]) -> None:
        """Forget all other block types. Their agreed policies are kept, in case the types run again."""
        kept = {*digests, *self.open_types.recorded}
        self.block_types = {digest: block_type for digest, block_type in self.block_types.items() if digest in kept}

    # -- block types at other input sizes

    def origin(self, digest: str) -> str:
        """The block type whose policies this one runs: another size of it if they were adopted, else itself."""
        return self._origins.get(digest, digest)

    def at_sizes(
        self, like: str, recording: Recording, sizes: Sizes, inputs: Sequence[torch.Tensor]
    ) -> tuple[KnownType, Recording] | None:
        """The block type and the recording of a block at these input sizes, as predicted from other sizes.

        `recording` is the block's recording as the block type `like`. None if the recordings so far do not tell.
        """
        program = self.open_types.of(like)
        if program is None or self._limit is None:
            return None
        known = self.block_types.get(program.at(sizes) or "")
        if known is not None:
            predicted = known.recording.of_block(recording)
            return (known, predicted) if fits(predicted, inputs) else None
        predicted = program.program.at(sizes, recording)
        if predicted is None or not fits(predicted, inputs):
            return None
        profile = program.profile.at(sizes, predicted)
        if profile is None:
            return None
        known = self.add(predicted.digest, predicted, profile)
        self.open_types.follow(predicted.digest, like, sizes)
        self.adopt(known, like)
        return known, predicted

    def adopt(self, known: KnownType, like: str) -> bool:
        """Put policies in force for a block type whose program is that of `like` at other input sizes.

        They are searched for without a solver. Returns whether any fit; otherwise the type waits for a plan.
        """
        relative, digest = self.block_types.get(self.origin(like)), known.recording.digest
        if self._limit is None or known.agreed is not None or relative is None or relative.agreed is None:
            return False
        agreed = relative.agreed
        known.errors, known.errors_are_measured = relative.errors, relative.errors_are_measured
        known.outlier_channels, known.calls_per_block = dict(relative.outlier_channels), agreed.spec.calls_per_block
        known.count = agreed.spec.count
        profile = agreed.correction.of(self._resize(digest, self._counted(known), agreed.capacity))
        adoption = Adoption(agreed, profile, self._agreed, self._live_sets, self.forward_order.orders)
        limit = self._budget_of(adoption.without)
        name = agreed.spec.name
        # A policy that awaits its trial is taken too: its blocks hold everything exactly until then.
        policies = adoption.policies(limit, lambda index, policy: not self.approvals.is_rejected((name, index), policy))
        if policies is None:
            return False
        self._limit = limit
        known.agreed = replace(agreed, spec=replace(adoption.spec, name=digest), policies=policies)
        self._agreed[digest], self._origins[digest] = known.agreed, name
        self.forward_order.follow(digest, name)
        return True

    def drop_adopted(self, all_but: Collection[str] = (), most: int = 0) -> list[str]:
        """Forget the adopted block types but for `all_but` and the latest `most`; returns their names."""
        names = [name for name in self._origins if name not in all_but]
        dropped = names[: max(len(names) - most, 0)]
        for name in dropped:
            del self._origins[name]
            self._agreed.pop(name, None)
        self.open_types.forget(dropped)
        return dropped

    @property
    def undecided(self) -> tuple[str, ...]:
        return tuple(digest for digest, block_type in self.block_types.items() if block_type.policies is None)

    def decide(
        self,
        live_sets: Collection[LiveSet],
        device: torch.device | None,
        reason: str,
        must_fit: bool = True,
        capacity: Mapping[str, Mapping[int, int]] | None = None,
        corrections: Mapping[str, Correction] | None = None,
    ) -> Plan:
        """Agree on policies for these live sets and all sets that share block types with them. Put them in force.

        Every rank must call; each may pass different live sets. `capacity` (the same on all ranks) and `corrections`
        (measured on this rank) are by block type, and replace the agreed ones. The first plan converts a budget that is
        a fraction or "auto" into bytes; later plans use that number. `device` is None on a rank that has run no block
        yet; the memory of the other ranks then sets the budget.

        Raises on every rank what the first rank raises: planner.InfeasibleBudget, and from the second plan on
        planner.NoSolutionInTime. In that case nothing has changed. With `must_fit` false neither is raised: policies in
        force stay, block types without a policy are recomputed where possible, and a warning says so.
        """
        new = {names for sets in self._ranks.gather(list(live_sets)) for names in sets}
        known = largest((*self._live_sets, *new))
        touched = {name for names in components(known) if any(names & s for s in new) for name in names}
        mine = sorted(touched & self.block_types.keys())
        reports = {digest: self._report(digest, capacity or {}, corrections or {}) for digest in mine}
        available = None if device is None else available_bytes(device, self._recomputed(known))
        told = self._ranks.gather((reports, self.forward_order.orders, available))
        everyone, orders, free = zip(*told, strict=True)
        present = frozenset(digest for given in everyone for digest in given)
        sets = largest(names & present for names in known)
        agreed_orders = merge_orders(orders)
        room = min(nbytes for nbytes in free if nbytes is not None)
        plan, agreed = self._ranks.on_first(
            lambda: self._attempt(everyone, PlanContext(sets, agreed_orders, room, reason, must_fit))
        )
        self.forward_order.orders = agreed_orders
        for group in plan.groups:
            if group.solution.fallback:
                text = (
                    "the solver gave no plan (%s; adacc.solver.max_seconds = %s). A plan of simple rules is in force: "
                    "it keeps the budget, but may be slower"
                )
                get_logger().warning(text, group.solution.fallback, self._config.solver.max_seconds)
            if group.shortfall:
                text = (
                    "no plan fits the budget; blocks without a plan are recomputed where possible. Planned peak: %s. %s"
                )
                get_logger().warning(text, planner.human_bytes(group.solution.peak), group.shortfall)
        self._limit = max(plan.budget, self._limit or 0)
        self._put_in_force(agreed)
        self._remember((*(names for names in known if not names & touched), *sets), plan)
        return plan

    def _remember(self, live_sets: Iterable[LiveSet], plan: Plan) -> None:
        """Keep the live sets for later plans, except those that no plan fits: they would make others fail too."""
        unfit = {names for group in plan.groups if group.shortfall for names in group.unfit(plan.budget)}
        live = frozenset(self._agreed)
        self._unfit = largest(names for names in (*self._unfit, *unfit) if names <= live)
        self._live_sets = largest(names & live for names in set(live_sets) - unfit)

    def _put_in_force(self, agreed: Iterable[AgreedType]) -> None:
        for each in agreed:
            name = each.spec.name
            self._agreed.pop(name, None)  # the types planned last are kept longest
            self._origins.pop(name, None)
            self._agreed[name] = each
            if name in self.block_types:
                self.block_types[name].agreed = each
        for oldest in list(self._agreed)[:-_REMEMBERED]:
            del self._agreed[oldest]
        self.forward_order.keep(self._agreed)
        self.approvals.keep(self._agreed)

    def is_planned(self, names: LiveSet) -> bool:
        """Whether these block types were planned together, or together fit the budget under their current policies."""
        agreed = [self.block_types[name].agreed for name in names]
        if None in agreed:
            return False
        # An adopted type was priced in the live sets of its origin, but not beside another size of the same program.
        origins = frozenset(map(self.origin, names))
        if len(origins) == len(names) and any(origins <= known for known in (*self._live_sets, *self._unfit)):
            return True
        problem = planner.Problem(tuple(each.spec for each in agreed))
        peak = planner.peak_bytes(problem, [each.policies for each in agreed])
        return self._limit is not None and peak <= self._limit

    def partners(self, digests: Sequence[str]) -> list[LiveSet]:
        """The live sets to plan again with these block types, the same on all ranks.

        These are the sets that share a block type, directly or through other sets. Block types that are only in sets
        without a fitting plan are left out.
        """
        lost = frozenset().union(*self._unfit) - frozenset().union(*self._live_sets)
        digests = [digest for digest in digests if digest not in lost]
        sets = (*self._live_sets, *(frozenset((digest,)) for digest in digests))
        reached = [names for names in components(sets) if not names.isdisjoint(digests)]
        return [names for names in largest(sets) if any(names <= component for component in reached)]

    def held_bytes(self, calls: Mapping[tuple[str, int | None], int]) -> int:
        """Bytes that `calls` hold under the policies in force: the number of calls by block type and block index."""
        return sum(count * self.block_types[digest].held_bytes(index) for (digest, index), count in calls.items())

    def outlier_bytes(self, name: str, known: KnownType, index: int, capacity: int) -> int:
        """Bytes of an outlier codec's payload for a value if the codec keeps `capacity` channels raw."""
        value = known.recording.values[index]
        codec = self._codecs.make(name, torch.device("cpu"), torch.zeros(capacity, dtype=torch.long))
        return codec.payload_bytes(torch.Size(rows(value)), value.geometry.dtype)

    def _report(
        self, digest: str, capacity: Mapping[str, Mapping[int, int]], corrections: Mapping[str, Correction]
    ) -> RankReport:
        known = self.block_types[digest]
        channels = {**known.capacity, **capacity.get(digest, {})}
        return RankReport(self._counted(known), known.count, known.calls_per_block, channels, corrections.get(digest))

    def _counted(self, known: KnownType) -> planner.Profile:
        profile = known.profile if self.approvals.bound is None else known.errors.of(known.profile)
        return with_held_inputs(profile, known.recording, self.inputs)

    def _recomputed(self, live_sets: Iterable[LiveSet]) -> int:
        """Predicted peak bytes of this rank's blocks if they recompute all that they can."""
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
        self, everyone: Sequence[Mapping[str, RankReport]], context: PlanContext
    ) -> tuple[Plan, tuple[AgreedType, ...]]:
        """The plan, and the new `AgreedType` of each of its block types."""
        merged = self._merge(everyone)
        specs = {digest: each.spec for digest, each in merged.items()}
        request = PlanRequest(specs, context.live_sets, context.orders, self.approvals.aim)
        without = most_without(request)
        budget = self._budget(without, context.available)
        forgiven: tuple[type[Exception], ...] = (planner.InfeasibleBudget, planner.NoSolutionInTime)
        if context.must_fit:
            forgiven = (planner.NoSolutionInTime,) if self._limit is None else ()
        settled = {digest: agreed.policies for digest, agreed in self._agreed.items() if self._may_all_run(agreed)}
        try:
            groups = solve(request, budget, self._config, settled, forgiven)
        except planner.InfeasibleBudget as error:
            recordings = {digest: known.recording for digest, known in self.block_types.items()}
            raise explained(error, request, without, recordings) from None
        plan = Plan(groups, budget, without, context.reason, compare(groups, budget))
        chosen = plan.policies
        agreed = (replace(merged[each.name], spec=each, policies=chosen[each.name]) for each in plan.block_types)
        return plan, tuple(agreed)

    def _may_all_run(self, agreed: AgreedType) -> bool:
        """Whether no policy of the type's blocks was found to exceed the bound on the gradient error."""
        profile, policies = agreed.spec.profile, enumerate(agreed.policies)
        name = self.origin(agreed.spec.name)
        return all(self.approvals.permit((name, index), policy, profile) for index, policy in policies)

    def _budget(self, without: int, available: int) -> int:
        if self._config.forces_compression and self._config.memory_budget.kind == "auto":
            return _UNLIMITED
        if self._limit is None:
            return budget_bytes(self._config.memory_budget, without, available)
        return self._budget_of(without)

    def _budget_of(self, without: int) -> int:
        """The budget in bytes, once there is one. A fraction is of the largest peak without checkpointing so far."""
        assert self._limit is not None
        if self._config.memory_budget.kind != "fraction":
            return self._limit
        return max(self._limit, budget_bytes(self._config.memory_budget, without, 0))

    def _merge(self, everyone: Sequence[Mapping[str, RankReport]]) -> dict[str, AgreedType]:
        """The ranks' reports on each block type merged into one `AgreedType`, without policies yet, by digest."""
        merged = {}
        for digest in sorted({digest for told in everyone for digest in told}):
            reports = [told[digest] for told in everyone if digest in told]
            before = self._agreed[digest].correction if digest in self._agreed else Correction()
            capacity, correction = merge_capacity(reports), merge_corrections(reports, before)
            profile = correction.of(self._resize(digest, merge_profiles(reports), capacity))
            spec = merge_block_type(digest, profile, reports)
            spec = replace(spec, strictness=self.approvals.strictness(digest, spec.blocks))
            merged[digest] = AgreedType(spec, (), capacity, correction)
        return merged

    def _resize(self, digest: str, profile: planner.Profile, capacity: Mapping[int, int]) -> planner.Profile:
        """The profile with the payload bytes of outlier codecs at these capacities."""
        if digest not in self.block_types:
            return profile
        block_type = self.block_types[digest]
        codecs = list(profile.codecs)
        for index, channels in capacity.items():
            names = [cost.codec for cost in codecs[index] if separates_outliers(cost.codec)]
            sizes = {name: self.outlier_bytes(name, block_type, index, channels) for name in names}
            codecs[index] = tuple(replace(cost, nbytes=sizes.get(cost.codec, cost.nbytes)) for cost in codecs[index])
        return replace(profile, codecs=tuple(codecs))
