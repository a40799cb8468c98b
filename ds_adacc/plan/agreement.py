"""What all ranks have agreed on, and what this one has adopted: the budget in bytes, the policies of block types."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ds_adacc import planner
from ds_adacc.config import AdaccConfig
from ds_adacc.execute.block import Block
from ds_adacc.execute.input_placement import InputPlacement
from ds_adacc.log import EngineLog
from ds_adacc.plan.approvals import Approvals, BlockErrors, BlockKey
from ds_adacc.plan.block_type import AdoptedPlan, KnownType, TypePlan
from ds_adacc.plan.budget import Budget
from ds_adacc.plan.forward_order import ForwardOrder, ForwardPass
from ds_adacc.plan.live_sets import Alive, LiveSet, TypePolicies, components, maximal
from ds_adacc.plan.outlier_prices import OutlierPrices
from ds_adacc.plan.passes import Passes
from ds_adacc.plan.placed_inputs import with_placed_inputs
from ds_adacc.plan.plan import Plan
from ds_adacc.profile.codec_maker import CodecMaker
from ds_adacc.program.recording import Recording

_REMEMBERED = 256  # block types whose policies are kept in case they run again


@dataclass(frozen=True)
class AgreementState:
    """The part of an `Agreement` that a checkpoint saves. `limit` is in bytes."""

    limit: int | None = None
    live_sets: tuple[LiveSet, ...] = ()
    unfit: tuple[LiveSet, ...] = ()
    orders: tuple[tuple[LiveSet, tuple[str, ...]], ...] = ()
    agreed: tuple[TypePlan, ...] = ()
    errors: tuple[tuple[BlockKey, BlockErrors], ...] = ()
    repeated: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise ValueError unless every policy is valid for its block type."""
        for plan in self.agreed:
            for policy in set(plan.policies):
                policy.check(plan.spec.profile)


class Agreement:
    """The block types that this rank has run, and the policies in force.

    What was planned is the same on every rank: a `Coordinator` changes it on all of them at once. What was adopted, at
    input sizes for which nothing was planned, is this rank's own: an `Adopter` adds it. `inputs` says how the block
    inputs that a policy retains are to be held (see `placement`). `log`: the engine's own, for all that its rooms tell.
    """

    def __init__(self, config: AdaccConfig, codecs: CodecMaker) -> None:
        self.config = config
        self.log = EngineLog()
        self.budget = Budget(config)
        self.forward_order = ForwardOrder()
        self.inputs = InputPlacement()
        self.approvals = Approvals(config.max_gradient_error)
        self.outlier_prices = OutlierPrices(codecs)
        self.restore(AgreementState(), {})

    def state(self) -> AgreementState:
        """The state to save in a checkpoint."""
        orders = tuple(self.forward_order.orders.items())
        agreed = tuple(self.planned_types.values())
        errors = tuple(self.approvals.blocks.items())
        repeated = tuple(sorted(self.repeated))
        return AgreementState(self.budget.limit, self.live_sets, self.unfit, orders, agreed, errors, repeated)

    def restore(self, state: AgreementState, indices: Mapping[Block, Mapping[str, int]]) -> None:
        """Restore the planned policies. Block types are forgotten; they are added again when their blocks run.

        `indices` holds, for each block, what `ForwardOrder.indices` returned.
        """
        # By digest: the block types that this rank has run, and those that have policies, planned or adopted. The
        # policies of a type that this rank has not run yet are kept until it runs. Of the planned types those planned
        # last come last, of the adopted ones those used last.
        self.known_types: dict[str, KnownType] = {}
        self.type_plans: OrderedDict[str, TypePlan] = OrderedDict((each.spec.name, each) for each in state.agreed)
        self.passes = Passes()  # the calls alive at once
        # The live sets that were planned for, and those for which no plan is known that fits.
        self.budget.limit, self.live_sets, self.unfit = state.limit, state.live_sets, state.unfit
        # The types in which a block's index has changed on this rank since the last plan. Errors are stored by index,
        # so this block would get another one's.
        self.reindexed: set[str] = set()
        self.approvals.blocks = dict(state.errors)
        # The names of the blocks of which all ranks run a second forward, with its collectives.
        self.repeated = frozenset(state.repeated)
        self.forward_order.restore(dict(state.orders), indices)

    @property
    def planned_types(self) -> dict[str, TypePlan]:
        """The types that were planned for, the same on every rank: those planned last come last."""
        return {name: plan for name, plan in self.type_plans.items() if not isinstance(plan, AdoptedPlan)}

    @property
    def adopted_types(self) -> dict[str, AdoptedPlan]:
        """The types that have adopted policies, on this rank alone: those used last come last."""
        return {name: plan for name, plan in self.type_plans.items() if isinstance(plan, AdoptedPlan)}

    @property
    def origins(self) -> dict[str, str]:
        """Of each type that has adopted policies, the type at another size that they were planned for."""
        return {name: plan.origin for name, plan in self.adopted_types.items()}

    def add(self, recording: Recording, profile: planner.Profile) -> KnownType:
        """Add a new block type. If the ranks have agreed on policies for it before, these are in force here too."""
        known = self.known_types[recording.digest] = KnownType(recording.of_type(), profile, self.type_plans)
        if known.plan is not None:
            known.count, known.calls_per_block = known.plan.spec.count, known.plan.spec.calls_per_block
        timed = next((each for each in self._at_other_sizes(known) if each.is_timed), None)
        if timed is not None:
            known.time_as(timed)
        return known

    def note_second_forward(self, digest: str, seconds: float) -> bool:
        """Note how long one has taken. Returns whether the plan did not know of any such block how long it takes."""
        known = self.known_types.get(digest)
        if known is None:  # forgotten meanwhile
            return False
        is_first = known.plan is not None and not known.is_timed
        known.note_second_forward(seconds)
        for each in self._at_other_sizes(known):
            if not each.is_timed:
                each.time_as(known)
        return is_first

    def _at_other_sizes(self, known: KnownType) -> list[KnownType]:
        """Those of the same blocks at other sizes, if they are recomputed as a whole."""
        if not known.recording.is_whole:
            return []
        whole = (each for each in self.known_types.values() if each.recording.is_whole and each is not known)
        return [each for each in whole if each.recording.ops[0].name == known.recording.ops[0].name]

    def arrange(self, seen: ForwardPass) -> None:
        """Learn from one forward and backward the order of the blocks, and how often each block is called."""
        self.reindexed |= self.forward_order.learn(seen, self.known_types.keys())
        for digest in seen.digests & self.known_types.keys():
            known = self.known_types[digest]
            known.calls_per_block = _shared(known.count, seen.equal_blocks(digest))

    def note_alive(self, digest: str, alive: int, blocks: int) -> None:
        """Note for the next plan that calls in so many blocks were `alive` at once.

        The count never decreases. But that of a new size is a guess until a pass with it has ended.
        """
        known = self.known_types[digest]
        if known.fewest is None and isinstance(known.plan, AdoptedPlan):
            spec = known.plan.of_calls(alive).spec
            known.count, known.calls_per_block = spec.count, spec.calls_per_block
        elif known.fewest is None and known.plan is None:  # it has found nothing to adopt
            known.count = 0
        known.fewest = alive if known.fewest is None else min(alive, known.fewest)
        if alive > known.count:
            known.count, known.calls_per_block = alive, _shared(alive, blocks)

    @property
    def grown(self) -> set[str]:
        """The block types of which more calls were alive at once than the ranks have planned for."""
        planned = self.planned_types
        known = ((name, known) for name, known in self.known_types.items() if name in planned)
        return {name for name, known in known if known.count > planned[name].spec.count}

    def alive(self, names: Collection[str]) -> Alive:
        """The most calls of these block types that were alive at once so far, each for itself."""
        return {name: self.known_types[name].count for name in sorted(names)}

    def agreed_policies(self, digests: Iterable[str]) -> dict[str, TypePolicies]:
        """The policies in force on all ranks, by block type, including types that this rank has not run.

        Adopted policies are not among them: each rank adopts its own.
        """
        planned = self.planned_types
        return {digest: planned[digest].policies for digest in digests if digest in planned}

    def runs(self, digest: str, policies: TypePolicies) -> bool:
        """Whether these policies are in force for the block type."""
        return digest in self.type_plans and self.type_plans[digest].policies == policies

    def permits(self, digest: str, index: int | None) -> bool:
        """Whether the block with this index may run its policy: the bound on the gradient error is known to hold."""
        plan = self.type_plans[digest]
        return self.approvals.permit((self.origin(digest), index), plan.policy(index), plan.spec.profile)

    def lacks_index(self, block: Block, digest: str) -> bool:
        """Whether the block may run nothing lossy, though its type may, since its index is not known."""
        plan = self.type_plans.get(digest)
        if plan is None or self.approvals.max_error is None or self.forward_order.index(block, digest) is not None:
            return False
        return plan.has_lossy

    def may_all_run(self, digest: str) -> bool:
        """Whether every policy of the type's blocks is known to keep the bound on the gradient error."""
        return all(self.permits(digest, index) for index in range(len(self.type_plans[digest].policies)))

    def has_trials(self, plan: Plan) -> bool:
        """Whether a policy of the plan must be measured before it comes into force."""
        return not all(self.may_all_run(block_type.name) for block_type in plan.block_types)

    def errors_in_force(self) -> dict[BlockKey, float]:
        """The measured gradient errors of the policies in force, by block."""
        return self.approvals.in_force(self.type_plans.values())

    @property
    def has_lossy(self) -> bool:
        """Whether a policy in force is lossy, where the section bounds its error."""
        return self.approvals.max_error is not None and any(each.has_lossy for each in self.type_plans.values())

    def is_lossy(self, block: Block, digest: str) -> bool:
        """Whether the policy in force for this block is lossy, where the section bounds its error."""
        plan = self.type_plans.get(digest)
        if plan is None or self.approvals.max_error is None:
            return False
        return plan.is_lossy(self.forward_order.index(block, digest))

    def forget_all_but(self, digests: Collection[str]) -> None:
        """Forget all other block types. Their agreed policies are kept, in case the types run again."""
        self.known_types = {digest: known for digest, known in self.known_types.items() if digest in digests}
        self.passes.forget_all_but(self.known_types)

    def block_key(self, block: Block, digest: str) -> BlockKey:
        """By what a block is known to the approvals, whatever the sizes of its inputs. `digest`: its type at these."""
        return self.origin(digest), self.forward_order.index(block, digest)

    def origin(self, digest: str) -> str:
        """The block type whose policies this one runs: another size of it if they were adopted, else itself."""
        plan = self.type_plans.get(digest)
        return plan.origin if isinstance(plan, AdoptedPlan) else digest

    def take_order_of_origins(self, alive: Alive) -> None:
        """Have these block types come in the order of those whose policies they run."""
        self.forward_order.copy_order(alive, {name: self.origin(name) for name in alive})

    @property
    def undecided(self) -> tuple[str, ...]:
        return tuple(digest for digest, known in self.known_types.items() if known.policies is None)

    def partners(self, digests: Sequence[str], include_unfit: bool = False) -> list[LiveSet]:
        """The live sets to plan again with these block types, the same on all ranks.

        These are the sets that share a block type, directly or through other sets. Sets without a fitting plan, and
        block types that are only in these, are left out unless `include_unfit`.
        """
        known = (*self.live_sets, *self.unfit) if include_unfit else self.live_sets
        lost = frozenset().union(*self.unfit) - frozenset().union(*known)
        digests = [digest for digest in digests if digest not in lost]
        sets = (*known, *(frozenset((digest,)) for digest in digests))
        reached = [names for names in components(sets) if not names.isdisjoint(digests)]
        return [names for names in maximal(sets) if any(names <= component for component in reached)]

    def lacks_errors(self, known: KnownType) -> bool:
        """Whether this rank has yet to measure the gradient errors of the type's codecs, which are bounded."""
        return self.approvals.max_error is not None and not known.errors_are_measured and known.offers_lossy

    def repeated_policies(self, profile: planner.Profile, like: str, blocks: int) -> TypePolicies:
        """What so many blocks run whose second forward calls collectives, if they are the blocks of the type `like`."""
        names = self.forward_order.names(like)
        return tuple(self.repeated_policy(profile, names.get(index, "")) for index in range(blocks))

    def repeated_policy(self, profile: planner.Profile, name: str) -> planner.Policy:
        """What the block of this name runs, whose second forward calls collectives (Rule T8)."""
        return (planner.recompute_policy if name in self.repeated else planner.retain_policy)(profile)

    def placement(self, known: KnownType) -> InputPlacement:
        """How the block inputs that a policy of the type retains are held: as shares only where the ranks have agreed.

        What is not planned for yet, or was adopted on this rank alone, is held by each rank as a whole.
        """
        return self.inputs.shared_if(known.plan is not None and known.plan.shares_inputs)

    def profile_of(self, known: KnownType, inputs: InputPlacement | None = None) -> planner.Profile:
        """The profile to plan with: its codecs have the errors measured so far, its inputs are held as `inputs` says.

        None: as they are held now.
        """
        profile = known.profile if self.approvals.max_error is None else known.errors.applied_to(known.profile)
        if known.keeps_graph:
            profile = replace(profile, graph=profile.graph.kept)
        if known.keeps_casts is False and profile.graph.has_cached:
            profile = replace(profile, graph=profile.graph.uncached)
        return with_placed_inputs(profile, known.recording, inputs or self.placement(known))

    def set_planned(self, planned: Sequence[TypePlan]) -> None:
        """Put planned policies in force. The block types planned longest ago are forgotten, the same on every rank.

        What was approved with other outlier channels is approved no longer.
        """
        for each in planned:
            before = self.type_plans.pop(each.spec.name, each)  # the types planned last are kept longest
            old, new = before.capacity, each.capacity
            self.approvals.withdraw(each.spec.name, {i for i in {*old, *new} if old.get(i) != new.get(i)})
            self.type_plans[each.spec.name] = each
        for name in [*self.planned_types][: -max(_REMEMBERED, len(planned))]:
            del self.type_plans[name]
        self.forward_order.forget_all_but(self.type_plans)
        self.approvals.forget_all_but(self.type_plans)

    def forget_planned(self, names: Collection[str]) -> None:
        """Forget what was planned for these block types: they adopt policies anew, or wait for a plan."""
        for name in names:
            self.type_plans.pop(name, None)
        self.live_sets = tuple(each for each in self.live_sets if each.isdisjoint(names))
        self.unfit = tuple(each for each in self.unfit if each.isdisjoint(names))

    def adopt(self, plan: TypePlan, origin: str, is_priced: bool = True) -> None:
        """Put policies in force, on this rank alone, that were adopted from the block type `origin`.

        It holds the inputs that they retain as a whole.
        """
        parts = plan.spec, plan.policies, plan.capacity, plan.correction
        self.type_plans[plan.spec.name] = AdoptedPlan(*parts, origin=origin, is_priced=is_priced)
        self.forward_order.copy_indices(plan.spec.name, origin)

    def note_use(self, digest: str) -> bool:
        """Note that a block of this type is called: of the adopted types, those used last are kept longest.

        Returns whether the type has policies.
        """
        plan = self.type_plans.get(digest)
        if isinstance(plan, AdoptedPlan):
            self.type_plans.move_to_end(digest)
        return plan is not None

    def forget_adopted(self, names: Collection[str]) -> None:
        """Forget these adopted block types."""
        self.forward_order.forget(set(names))
        for name in names:
            del self.type_plans[name]
            self.known_types.pop(name, None)


def _shared(calls: int, blocks: int) -> int:
    """How many of the calls each of the blocks has; all of them if these cannot be equally many."""
    return calls // blocks if blocks and calls % blocks == 0 else calls
