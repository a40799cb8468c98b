"""The closed loop: predictions are compared with what was measured, and the model is corrected by the difference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from ds_adacc import planner
from ds_adacc.correction import Correction
from ds_adacc.decision import Decision
from ds_adacc.graph import Gradients
from ds_adacc.kind import Kind
from ds_adacc.meter import Measured

TOLERANCE = 0.05


@dataclass(frozen=True)
class Pair:
    """A prediction, and what was observed: bytes, or seconds."""

    planned: float
    observed: float

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


def peak(decision: Decision, excess: Mapping[str, Correction]) -> Pair:
    """The decision's peak as planned, and with what its calls took beyond."""
    peaks = []
    for group in decision.groups:
        kinds = (
            replace(kind, profile=excess.get(kind.name, Correction()).of(kind.profile)) for kind in group.problem.kinds
        )
        peaks.append(planner.peak_bytes(replace(group.problem, kinds=tuple(kinds)), group.solution.policies))
    return Pair(decision.peak, max(peaks))


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
    return Correction(forward, call.backward_growth - max(max(run.timeline, default=0) - at_first, 0))
