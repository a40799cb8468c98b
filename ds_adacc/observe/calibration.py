"""The closed loop: compare predictions with measurements, and correct the memory model by the difference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from ds_adacc import planner
from ds_adacc.log import EngineLog
from ds_adacc.observe.device_memory import DeviceMemory
from ds_adacc.observe.step_profiler import Measured
from ds_adacc.plan.block_type import KnownType
from ds_adacc.plan.correction import Correction
from ds_adacc.plan.live_sets import LiveSet
from ds_adacc.plan.plan import Plan

Number = TypeVar("Number", int, float)
_TOLERANCE = 0.05
_MOST_CORRECTIONS = 3
_NEGLIGIBLE = 1 << 16  # bytes; allocators round sizes by about as much


@dataclass(frozen=True)
class Pair(Generic[Number]):
    """A prediction and an observation, both in bytes or both in seconds."""

    planned: Number
    observed: Number

    @property
    def is_off(self) -> bool:
        """Whether the two differ by more than 5 % of the prediction."""
        return abs(self.observed - self.planned) > _TOLERANCE * self.planned


@dataclass(frozen=True)
class Observation:
    """The observations of one step under a plan, with the predictions.

    `held`: bytes held when backward began; the prediction is for exactly the calls of that step. `peak`: peak bytes of
    the plan, as predicted, and with what the calls of that step have taken beyond their prediction.
    `seconds`: seconds of the blocks' forwards and backwards, but for those whose end did not show, and those in which
    more ran than the plan. None: not measured. `device`: what the process has taken of a CUDA device by then.
    """

    held: Pair[int]
    peak: Pair[int] | None
    seconds: Pair[float] | None
    device: DeviceMemory | None = None


@dataclass(frozen=True)
class Findings:
    """The result of a comparison: the observations and, if the memory model was wrong, what to plan again.

    `corrections` holds one for each block type that was measured on this rank. `live_sets` are to be planned again with
    these corrections, for this `reason`.
    """

    observation: Observation
    corrections: Mapping[str, Correction]
    live_sets: frozenset[LiveSet] = frozenset()
    reason: str = ""


class Calibration:
    """Compares each plan with the first step under it.

    `corrected` counts the corrections of the memory model in a row. When a plan needs none, the count falls to 1, or
    stays 0 if there was none.
    """

    def __init__(self, log: EngineLog, corrected: int = 0) -> None:
        self._log = log
        self.corrected = corrected

    def compare(
        self,
        plan: Plan,
        held: Pair,
        measured: Sequence[Measured],
        known_types: Mapping[str, KnownType],
        origins: Mapping[str, str],
    ) -> Findings:
        """Compare a step under the plan with the plan, and compute the corrections of the memory model.

        `origins`: of each block type whose policies were adopted from another input size, the type at that size.
        """
        excess, by_policy = excesses(measured, known_types), _excesses_by_policy(measured, known_types)
        for digest in [digest for digest, each in excess.items() if _is_doubted(each, known_types[digest])]:
            _warn_of_others(self._log, known_types[digest], _size(excess.pop(digest)))
        excess = at_planned_sizes(excess, known_types, origins)
        counted = {digest: known_types[digest].in_force.correction for digest in excess}
        found = peak(plan, excess, by_policy)
        unseen = [known_types[digest].recording.name for digest, each in excess.items() if each.backward is None]
        is_seen = len(unseen) < len(excess)
        _log_unseen(self._log, unseen, is_seen)
        observation = Observation(held, found if is_seen else None, observed_seconds(measured, known_types))
        fitting = [group for group in plan.groups if not group.shortfall]
        more = self._to_correct(excess, plan, found) if found is not None and fitting else {}
        if found is None or not more:
            self.corrected = min(self.corrected, 1)  # a later plan, made for another reason, may need corrections again
            return Findings(observation, counted)
        self.corrected += 1
        about = "about " if unseen else ""
        reason = f"the plan before took {about}{planner.human_bytes(round(found.observed))}"
        corrections = counted | {digest: counted[digest].plus(each) for digest, each in more.items()}
        live_sets = frozenset(names for group in fitting for names in group.live_sets)
        return Findings(observation, corrections, live_sets, reason)

    def _to_correct(self, excess: Mapping[str, Correction], plan: Plan, found: Pair) -> dict[str, Correction]:
        """The corrections to apply, by block type: if the peak exceeded the budget, or a lower one could save time.

        After three corrections in a row there are no more.
        """
        exceeds = found.observed > plan.budget
        matters = exceeds or (found.is_off and plan.added_seconds > 0)
        if not matters or abs(found.observed - found.planned) < _NEGLIGIBLE or self.corrected == _MOST_CORRECTIONS:
            return {}
        # The excess depends on the policy: what is too high under one may be right under the next one.
        if exceeds or self.corrected:
            excess = {digest: each.upward() for digest, each in excess.items()}
        return {digest: each for digest, each in excess.items() if each.plus(Correction()) != Correction()}


def excesses(measured: Iterable[Measured], known_types: Mapping[str, KnownType]) -> dict[str, Correction]:
    """By block type, the most bytes that its calls took beyond the prediction, in forward and in backward.

    Block types whose bytes were not measured are left out.
    """
    found: dict[str, Correction] = {}
    for call in measured:
        excess = _excess(call, known_types[call.digest]) if _ran_the_plan(call, known_types) else None
        if excess is not None:
            found[call.digest] = excess.larger(found[call.digest]) if call.digest in found else excess
    return found


def _excesses_by_policy(
    measured: Iterable[Measured], known_types: Mapping[str, KnownType]
) -> dict[tuple[str, planner.Policy], Correction]:
    """As `excesses`, of each policy that a block type has run."""
    calls: dict[tuple[str, planner.Policy], list[Measured]] = {}
    for call in measured:
        calls.setdefault((call.digest, call.policy), []).append(call)
    found = {key: excesses(alike, known_types).get(key[0]) for key, alike in calls.items()}
    return {key: excess for key, excess in found.items() if excess is not None}


def at_planned_sizes(
    excess: Mapping[str, Correction], known_types: Mapping[str, KnownType], origins: Mapping[str, str]
) -> dict[str, Correction]:
    """The excess of the block types that were planned for.

    Where lengths vary, the step under a plan seldom has the planned ones. The excess of another size of the same
    program is then scaled: most of what a model of memory misses grows with the tensors.
    """
    found = {digest: each for digest, each in excess.items() if digest not in origins}
    for digest in excess.keys() & origins.keys():
        origin = origins[digest]
        if origin not in excess:
            scaled = excess[digest].scaled(_retained(known_types[origin]) / _retained(known_types[digest]))
            found[origin] = scaled.larger(found[origin]) if origin in found else scaled
    return found


def _retained(known: KnownType) -> int:
    """The most bytes that a call takes without checkpointing."""
    profile = known.in_force.spec.profile
    return planner.simulate(profile, planner.retain_policy(profile)).inner_peak


def _is_doubted(excess: Correction, known: KnownType) -> bool:
    """Whether the excess is more than the block itself can take: then something else has allocated while it ran.

    In forward, Python variables may keep all that the block ever makes. In backward, a prediction is not off by more
    than all that a call takes without checkpointing. A block that takes next to nothing is not doubted for as little:
    following a call takes a few states of the CPU's generator, of 5 KB each.
    """
    if _size(excess) < _NEGLIGIBLE:
        return False
    retained, made = _retained(known), sum(value.nbytes for value in known.in_force.spec.profile.graph.values)
    return abs(excess.forward) > max(made, retained) or abs(excess.backward or 0) > retained


def _warn_of_others(log: EngineLog, known: KnownType, nbytes: int) -> None:
    who = "other code has allocated it"
    if known.recording.runs_compiled:
        who = "other code has allocated it, or its compiled backward recomputes (a checkpoint inside)"
    log.warning(
        "while blocks like %s ran, %s more than planned was allocated. That is more than such a block takes, so %s, "
        "and the plan is not changed. If memory runs out, look for what allocates in backward: hooks, or buckets for "
        "communication (zero_optimization.reduce_bucket_size)",
        known.recording.name,
        planner.human_bytes(nbytes),
        who,
    )


def _log_unseen(log: EngineLog, names: Sequence[str], is_seen: bool) -> None:
    """Log of which blocks the backward was not seen. `is_seen`: it was of others."""
    if names:
        what = "the observed peak counts one backward as planned" if is_seen else "the peak of the plan is not observed"
        log.info(
            "%s: the end of the last backward of %s cannot be seen, since none of its inputs gets a gradient",
            what,
            " and ".join(sorted(set(names))),
        )


def _size(excess: Correction) -> int:
    return max(abs(excess.forward), abs(excess.backward or 0))


def peak(
    plan: Plan,
    excess: Mapping[str, Correction],
    by_policy: Mapping[tuple[str, planner.Policy], Correction],
) -> Pair | None:
    """The planned peak of the groups that ran, and their peak with the excess of their calls. None if no group ran.

    The blocks of a type may run several policies. Each counts with its own excess, as far as that was measured:
    what one of them takes beyond its prediction, another one may have been predicted to take.
    """
    groups = [group for group in plan.groups if any(block_type.name in excess for block_type in group.block_types)]
    if not groups:
        return None
    peaks = []
    for group in groups:
        known: planner.Simulations = {}
        block_types = []
        for block_type in group.problem.block_types:
            name, profile = block_type.name, block_type.profile
            most = excess.get(name, Correction())
            block_types.append(replace(block_type, profile=most.applied_to(profile)))
            for (digest, policy), own in by_policy.items():
                if digest == name and name in excess:
                    own = own if own.backward is not None else replace(own, backward=most.backward)
                    known[name, policy] = planner.simulate(own.applied_to(profile), policy)
        corrected = replace(group.problem, block_types=tuple(block_types))
        peaks.append(replace(group, problem=corrected).peak_of(group.solution.policies, known))
    return Pair(max(group.solution.peak for group in groups), max(peaks))


def observed_seconds(measured: Sequence[Measured], known_types: Mapping[str, KnownType]) -> Pair | None:
    """Seconds of the measured calls: their forwards, and the backwards whose end showed. None if none was measured."""
    planned = observed = 0.0
    for call in measured:
        if not _ran_the_plan(call, known_types):
            continue
        profile, policy = known_types[call.digest].in_force.spec.profile, call.policy
        forward, backward = profile.overlap_seconds
        offers = planner.chosen_codecs(profile, policy).values()
        compression = sum(offer.compress_seconds for offer in offers)
        if call.forward_seconds is not None:
            planned += forward + compression
            observed += call.forward_seconds
        if call.backward_seconds is not None:
            planned += backward + planner.simulate(profile, policy).seconds - compression
            observed += call.backward_seconds
    return Pair(planned, observed) if observed else None


def _ran_the_plan(call: Measured, known_types: Mapping[str, KnownType]) -> bool:
    """Whether the call ran a policy of the plan, and as the plan has it.

    A block whose policy is on trial recomputes all that it can.
    """
    known = known_types.get(call.digest)
    return known is not None and call.policy in (known.policies or ()) and not known.plan_frees_what_is_kept


def _excess(call: Measured, known: KnownType) -> Correction | None:
    """The bytes that a call took beyond the prediction; negative if it took fewer. None if they were not measured.

    A forward of which nothing is known counts as predicted.
    """
    if call.forward_growth is None and call.backward_growth is None:
        return None
    profile, policy = known.in_force.spec.profile, call.policy
    run = planner.simulate(profile, policy)
    given = sum(profile.graph.values[value.index].nbytes for value in known.recording.inputs)
    grown = max(max(run.forward, default=0) - given, 0)
    forward = 0 if call.forward_growth is None else call.forward_growth - grown
    if call.backward_growth is None:
        return Correction(forward, None)
    at_first = run.held + run.carried + known.recording.backward.bytes_of_outputs
    backward = call.backward_growth - max(max(run.timeline, default=0) - at_first, 0)
    # If some backwards keep their graph, one that frees it takes less.
    return Correction(forward, backward if profile.graph.frees_stored else max(backward, 0))
