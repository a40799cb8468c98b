"""Blocks with the same program have one block type: what this process knows of it, and the plan that it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ds_adacc import planner
from ds_adacc.execute.course import Course, course_of
from ds_adacc.kernels import separates_outliers
from ds_adacc.plan.correction import Correction
from ds_adacc.plan.live_sets import TypePolicies
from ds_adacc.plan.merged_graph import lending, merged_graph
from ds_adacc.profile.arrival import Entrance
from ds_adacc.profile.block_graph import carried_bytes
from ds_adacc.profile.gradient_error import CodecErrors
from ds_adacc.program.recording import Recording

_MOST_COURSES = 32  # a policy is new with each plan


@dataclass(frozen=True)
class TypePlan:
    """The policies of one block type, and what they were found for. What was planned is the same on every rank.

    The next planning replaces all of it.

    `spec`: the planner's input for this type.
    `policies`: one for each block, in forward order.
    `capacity`: how many outlier channels each value keeps raw, by value index.
    `correction`: the error of the measured profile in bytes; `spec.profile` includes it.
    `shares_inputs`: the tensor-parallel ranks may hold shares of retained block inputs. To restore one is a collective,
    so no rank decides that alone.
    """

    spec: planner.BlockType
    policies: TypePolicies
    capacity: Mapping[int, int]
    correction: Correction
    shares_inputs: bool = False

    def policy(self, block_index: int | None) -> planner.Policy:
        """The policy of the block with this index. A block without one gets the policy that holds the fewest bytes."""
        if block_index is not None and block_index < len(self.policies):
            return self.policies[block_index]
        return min(self.policies, key=lambda policy: policy.held_bytes(self.spec.profile))

    def is_lossy(self, block_index: int | None) -> bool:
        """Whether the policy of the block with this index is lossy."""
        return bool(self.policy(block_index).lossy_values(self.spec.profile))

    def of_calls(self, alive: int) -> TypePlan:
        """The block type if so many of its calls are alive at once: of each block equally many, at least one."""
        each = max(-(-alive // self.spec.blocks), 1)
        return replace(self, spec=replace(self.spec, count=self.spec.blocks * each, calls_per_block=each))

    @property
    def has_lossy(self) -> bool:
        """Whether the policy of any block is lossy."""
        return any(policy.lossy_values(self.spec.profile) for policy in set(self.policies))


@dataclass(frozen=True)
class AdoptedPlan(TypePlan):
    """The plan of a block type that was adopted from that of another size of its program, on this rank alone.

    `origin`: the block type at that size.
    `is_priced`: its peak beside the largest sizes of other programs is known. Else it is computed for each live set
    that has the type.
    """

    origin: str = field(kw_only=True)
    is_priced: bool = field(kw_only=True)


@dataclass
class KnownType:
    """What this process knows of a block type.

    `type_plans`: those of the `Agreement`.
    `count`: how many of its calls were alive at once. `calls_per_block`: how many of these each block has.
    `fewest`: the fewest calls that were alive in a pass; None before one has ended.
    `outlier_channels`: by value index, the most outlier channels found in any of its blocks on this rank. That is the
    capacity until the ranks agree on one.
    `errors`: the gradient errors of its codecs. Until they are measured, no lossy codec is offered where the section
    bounds them.
    `entrance`: where backward enters its blocks.
    `keeps_graph`: a backward has kept the graph of its calls (`retain_graph`). The next plan counts on that.
    `keeps_casts`: whether autocast has kept casts of its weights until the next block ran; None: that was not seen.
    `_courses`: how calls run, by the policies of late.
    `_retained_for_others`: the places of the inputs of which other calls hold the memory, each with whether the
    backward of such a call asks for it.
    """

    recording: Recording
    profile: planner.Profile
    type_plans: Mapping[str, TypePlan] = field(repr=False)
    count: int = 1
    calls_per_block: int = 1
    fewest: int | None = None
    outlier_channels: dict[int, int] = field(default_factory=dict)
    errors: CodecErrors = field(default_factory=CodecErrors)
    errors_are_measured: bool = False
    entrance: Entrance = field(default_factory=Entrance, repr=False)
    keeps_graph: bool = False
    keeps_casts: bool | None = None
    _courses: dict[planner.Policy, Course] = field(default_factory=dict, repr=False)
    _retained_for_others: dict[int, bool] = field(default_factory=dict, repr=False)

    @property
    def plan(self) -> TypePlan | None:
        """What the agreement has for the type now: what was planned, or what it has adopted; None before that."""
        return self.type_plans.get(self.recording.digest)

    @property
    def in_force(self) -> TypePlan:
        """Its plan. Ask only a type that is planned for, or has adopted policies."""
        assert self.plan is not None
        return self.plan

    @property
    def policies(self) -> TypePolicies | None:
        """The policies in force, of the blocks in forward order. None until there is a plan."""
        return None if self.plan is None else self.plan.policies

    @property
    def plan_frees_what_is_kept(self) -> bool:
        """Whether what is in force counts what its calls hold as freed by backward, which keeps it."""
        return self.keeps_graph and self.plan is not None and self.plan.spec.profile.graph.frees_stored

    @property
    def capacity(self) -> Mapping[int, int]:
        """The number of outlier channels kept raw, by value index."""
        return self.outlier_channels if self.plan is None else self.plan.capacity

    def policy(self, block_index: int | None) -> planner.Policy:
        """The policy in force for the block with this index. Until there is a plan, it recomputes all that it can."""
        return planner.recompute_policy(self.profile) if self.plan is None else self.plan.policy(block_index)

    @property
    def offers_lossy(self) -> bool:
        """Whether a lossy codec is on offer for any value."""
        return any(not cost.lossless for costs in self.profile.codecs for cost in costs)

    @property
    def adds_time(self) -> bool:
        """Whether a policy in force does anything but retain."""
        graph, retained = self.profile.graph, (None, planner.RETAIN)
        every = (policy.stores for policy in self.policies or ())
        return any(graph.replayed(stores) or not {*stores}.issubset(retained) for stores in every)

    @property
    def offloads(self) -> bool:
        """Whether a policy in force offloads a value or its payload."""
        return any(planner.is_offloaded(store) for policy in self.policies or () for store in policy.stores)

    def course(self, recording: Recording, policy: planner.Policy) -> Course:
        """How calls of a block of this type run under a policy: found once for all whose programs were predicted."""
        if not recording.was_predicted_with(self.recording):
            return course_of(recording, policy)
        if policy not in self._courses:
            if len(self._courses) >= _MOST_COURSES:
                self._courses.clear()
            self._courses[policy] = course_of(recording, policy)
        return self._courses[policy]

    def note_outliers(self, index: int, count: int) -> None:
        """Note that `count` outlier channels were found in the value `index` of a block of this type."""
        self.outlier_channels[index] = max(count, self.outlier_channels.get(index, 0))

    def note_casts(self, are_kept: bool) -> None:
        """Note whether autocast still keeps the casts of a call when the next block is recorded (Rule R23).

        If each block runs in a context of its own, it never does. Between two forwards of one pass it does not either.
        """
        self.keeps_casts = are_kept or bool(self.keeps_casts)

    def take_over(self, relative: KnownType) -> None:
        """Take over what was measured of the same program at another size of its inputs, and not at this one."""
        if not self.errors_are_measured:
            self.errors, self.errors_are_measured = relative.errors, relative.errors_are_measured
        self.outlier_channels = dict(relative.capacity)
        self.keeps_graph |= relative.keeps_graph
        self.keeps_casts = relative.keeps_casts if self.keeps_casts is None else self.keeps_casts
        for place, is_asked in relative._retained_for_others.items():
            self.retain_for_others(place, is_asked)

    @property
    def outlier_values(self) -> list[int]:
        """The indices of the values that a codec with separate outliers may hold or does hold."""
        offers = [[separates_outliers(cost.codec) for cost in costs] for costs in self.profile.codecs]
        return [index for index, separating in enumerate(offers) if self.holds_outliers(index) or any(separating)]

    def tracked_values(self, roles: Sequence[str]) -> list[int]:
        """The values in `outlier_values` that have one of these roles, or that an outlier codec holds.

        The channels of such a codec must be kept up to date.
        """
        values = self.recording.values
        return [i for i in self.outlier_values if values[i].role in roles or self.holds_outliers(i)]

    def outlier_codec(self, index: int) -> str:
        """The codec that keeps the outliers of a value raw, or else one that may. If there is none, the INT4 codec."""
        stored = (planner.on_device(policy.stores[index]) for policy in self.policies or ())
        names = *stored, *(cost.codec for cost in self.profile.codecs[index]), "outlier"
        return next(name for name in names if name is not None and separates_outliers(name))

    def narrow(self, offers: Sequence[Sequence[str]]) -> None:
        """From the next planning on, offer only the codecs in `offers`: those that this block too may use, by value."""
        kept = [
            tuple(c for c in costs if c.codec in names)
            for costs, names in zip(self.profile.codecs, offers, strict=True)
        ]
        self.profile = replace(self.profile, codecs=tuple(kept))

    @property
    def is_timed(self) -> bool:
        """Whether it is one operator of which the seconds are known. Until then they count as 0."""
        return self.recording.is_whole and self.profile.op_seconds != (0.0,)

    def time_as(self, relative: KnownType) -> None:
        """Take the seconds of a second forward from the same blocks at other sizes, until one is timed at this size."""
        ours, theirs = (each.profile.graph.values[-1].nbytes for each in (self, relative))
        if theirs:
            self.note_second_forward(relative.profile.op_seconds[0] * ours / theirs)

    def note_second_forward(self, seconds: float) -> None:
        """Note how long a second forward of a block of this type took: from the next planning on, the least counts."""
        (before,) = self.profile.op_seconds
        self.profile = replace(self.profile, op_seconds=(min(before or seconds, seconds),))

    def resume_whole(self, profile: planner.Profile) -> None:
        """Take over what the run that this one resumes has measured of a block as one operator."""
        self.note_more(profile)
        (seconds,) = profile.op_seconds
        if seconds:
            self.note_second_forward(seconds)

    def note_more(self, profile: planner.Profile) -> None:
        """A block of this type takes this as one operator: from the next planning on, the most that one takes counts.

        Blocks of one type may run different programs once they have read data.
        """
        self.profile = replace(self.profile, graph=merged_graph([self.profile.graph, profile.graph]))

    def retain_for_others(self, place: int, is_asked: bool) -> None:
        """From the next planning on, retain the input at this place: other calls hold the same memory.

        `is_asked`: the backward of such a call asks for it. If none does, nor that of this block, it is lent
        (`planner.Value.lent`). The backward of the other calls comes first, and leaves its gradient for this one to add
        to.
        """
        if is_asked <= self._retained_for_others.get(place, -1):  # this comes at every call
            return
        self._retained_for_others[place] = is_asked
        inputs = [value.index for value in self.recording.inputs if value.source == place]
        offers = [() if index in inputs else costs for index, costs in enumerate(self.profile.codecs)]
        carried = carried_bytes(self.recording, self._retained_for_others)  # anew: a resumed profile includes some
        graph = lending(self.profile.graph, inputs, inputs if is_asked else ())
        graph = replace(graph, carried_bytes=carried)
        self.profile = replace(self.profile, graph=graph, codecs=tuple(offers))

    def holds_outliers(self, index: int) -> bool:
        """Whether a policy in force holds the value with a codec that separates outliers."""
        return any(separates_outliers(planner.on_device(policy.stores[index])) for policy in self.policies or ())
