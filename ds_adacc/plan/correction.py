"""The measured error of a block type's profile, in bytes, and the corrected profile."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds_adacc import planner


@dataclass(frozen=True)
class Correction:
    """Bytes that a call takes in forward and in backward beyond the prediction of its profile. None: not known."""

    forward: int = 0
    backward: int | None = 0

    def larger(self, other: Correction) -> Correction:
        """The larger bytes of the two, for forward and for backward."""
        known = [each.backward for each in (self, other) if each.backward is not None]
        return Correction(max(self.forward, other.forward), max(known, default=None))

    def plus(self, other: Correction) -> Correction:
        """The sum of the two. Unknown bytes count as 0."""
        return Correction(self.forward + other.forward, (self.backward or 0) + (other.backward or 0))

    def scaled(self, factor: float) -> Correction:
        """This correction for calls that take `factor` times as many bytes."""
        return Correction(
            round(factor * self.forward), None if self.backward is None else round(factor * self.backward)
        )

    def upward(self) -> Correction:
        """This correction without its negative parts."""
        return Correction(max(self.forward, 0), max(self.backward or 0, 0))

    def applied_to(self, profile: planner.Profile) -> planner.Profile:
        """The profile with these bytes added."""
        graph = profile.graph
        more = self.backward or 0
        events = (replace(event, gradient_bytes=max(event.gradient_bytes + more, 0)).clipped for event in graph.events)
        overhead = max(graph.forward_overhead + self.forward, 0)
        return replace(profile, graph=replace(graph, events=tuple(events), forward_overhead=overhead))
