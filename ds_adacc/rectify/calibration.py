"""The closed loop: predictions are compared with what was measured, and the model is corrected by the difference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from ds_adacc import planner
from ds_adacc.plan.block_type import Kind
from ds_adacc.plan.coordinator import Portfolio
from ds_adacc.plan.correction import Correction
from ds_adacc.plan.plan import Decision, Together
from ds_adacc.profile.block_graph import Gradients
from ds_adacc.rectify.step_profiler import Measured

TOLERANCE = 0.05
_MOST_CORRECTIONS = 3
_NEGLIGIBLE = 1 << 16  # bytes: what allocators round by


@dataclass(frozen=True)
class Pair:
    """A prediction, and what was observed: bytes, or seconds."""

    planned: int | float
    observed: int | float

    @property
    def is_off(self) -> bool:
        """Whether they differ by more than 5 %."""
        return abs(self.observed - self.planned) > TOLERANCE * self.planned


@dataclass(frozen=True)
class Seen:
    """What one step under a plan showed.

    `held`: bytes when backward began, as planned for the very calls of that step; `peak`: bytes; `seconds`: of the
    blocks' forward, and their backward but for the last's. None where it could not be measured.
    """

    held: Pair
    peak: Pair | None
    seconds: Pair | None

    def to_json(self) -> dict[str, dict[str, float] | None]:
        """A plain dict."""
        return asdict(self)


class Loop:
    """Closes the loop after the first step under each plan; `reason` says why the plan is to be made anew, if it is.

    `corrected` counts how often the model was.
    """

    def __init__(self, portfolio: Portfolio, corrected: int = 0, reason: str = "") -> None:
        self.reason = reason
        self.corrected = corrected
        self._portfolio = portfolio

    def close(self, decision: Decision, held: Pair, measured: Sequence[Measured]) -> tuple[Seen, set[Together]]:
        """What was seen, and the sets of kinds to be planned for anew, by a model that has been corrected."""
        excess = excesses(measured, self._portfolio.kinds)
        for digest in excess:
            kind = self._portfolio.kinds[digest]
            kind.correction = kind.correction or Correction()
        found = peak(decision, excess)
        seen = Seen(held, found, observed_seconds(measured, self._portfolio.kinds))
        fitting = [group for group in decision.groups if not group.shortfall]
        self.reason = ""
        if found is None or not fitting or not self._matters(decision, found) or not self._correct(excess):
            return seen, set()
        self.reason = f"peak observed {planner.human_bytes(round(found.observed))}"
        return seen, {names for group in fitting for names in group.together}

    def _matters(self, decision: Decision, found: Pair) -> bool:
        """Whether the budget was broken, or the prediction off where time could be gained."""
        if abs(found.observed - found.planned) < _NEGLIGIBLE:
            return False
        return found.observed > decision.budget or (found.is_off and decision.added_seconds > 0)

    def _correct(self, excess: Mapping[str, Correction]) -> bool:
        """Whether there was anything to correct."""
        if self.corrected:  # policies differ in what they take beyond: only more is believed a second time
            excess = {digest: each.upward() for digest, each in excess.items()}
        excess = {digest: each for digest, each in excess.items() if each.plus(Correction()) != Correction()}
        if not excess or self.corrected == _MOST_CORRECTIONS:
            return False
        self.corrected += 1
        for digest, each in excess.items():
            kind = self._portfolio.kinds[digest]
            kind.correction = kind.correction.plus(each)
        return True


def excesses(measured: Iterable[Measured], kinds: Mapping[str, Kind]) -> dict[str, Correction]:
    """By kind, what its calls took beyond the prediction at most, in forward and in backward.

    Kinds of which no bytes were measured are left out.
    """
    found: dict[str, Correction] = {}
    for call in measured:
        if call.kind in kinds and kinds[call.kind].policies is not None and call.forward_growth is not None:
            excess = _excess(call, kinds[call.kind])
            found[call.kind] = excess.larger(found[call.kind]) if call.kind in found else excess
    return found


def peak(decision: Decision, excess: Mapping[str, Correction]) -> Pair | None:
    """The peak of the groups that ran as planned, and with what their calls took beyond; None if none ran."""
    groups = [group for group in decision.groups if any(kind.name in excess for kind in group.kinds)]
    if not groups:
        return None
    peaks = []
    for group in groups:
        kinds = (
            replace(kind, profile=excess.get(kind.name, Correction()).of(kind.profile)) for kind in group.problem.kinds
        )
        peaks.append(planner.peak_bytes(replace(group.problem, kinds=tuple(kinds)), group.solution.policies))
    return Pair(max(group.solution.peak for group in groups), max(peaks))


def observed_seconds(measured: Sequence[Measured], kinds: Mapping[str, Kind]) -> Pair | None:
    """Seconds of the calls measured in forward and, but for the last, in backward; None if there are none."""
    planned = observed = 0.0
    for call in measured:
        if call.kind not in kinds or kinds[call.kind].policies is None:
            continue
        profile, policy = _planned(kinds[call.kind], call.place)
        forward, backward = profile.hiding_seconds
        compression = sum(offer.compress_seconds for offer in planner.chosen_codecs(profile, policy).values())
        planned += forward + compression
        observed += call.forward_seconds
        if call.backward_seconds is not None:
            planned += backward + planner.simulate(profile, policy).seconds - compression
            observed += call.backward_seconds
    return Pair(planned, observed) if observed else None


def _planned(kind: Kind, place: int | None) -> tuple[planner.Profile, planner.Policy]:
    assert kind.agreed is not None
    return kind.agreed.profile, kind.policy(place)


def _excess(call: Measured, kind: Kind) -> Correction:
    """Bytes beyond the prediction, which may be negative."""
    profile, policy = _planned(kind, call.place)
    run = planner.simulate(profile, policy)
    given = sum(value.nbytes for value in profile.graph.values if value.producer is None)
    forward = call.forward_growth - max(max(run.forward, default=0) - given, 0)
    if call.backward_growth is None:
        return Correction(forward, None)
    at_first = run.held + Gradients(kind.recording).of_outputs
    grown = call.backward_growth - call.new_gradients
    return Correction(forward, grown - max(max(run.timeline, default=0) - at_first, 0))
