"""The profile of a program at a size at which it was not measured: bytes by formula, seconds on a line."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from operator import itemgetter

from ds_adacc import planner
from ds_adacc.kernels import separates_outliers
from ds_adacc.planner import units
from ds_adacc.profile.block_graph import block_graph, whole_graph
from ds_adacc.program.recording import Recording
from ds_adacc.program.signature import Sizes
from ds_adacc.sizes.formula import Variables


class SymbolicProfile:
    """The profiles of one program, measured at two sizes of its inputs."""

    def __init__(self) -> None:
        self._measured: dict[Sizes, planner.Profile] = {}
        self._channels: list[tuple[int, ...]] = []  # of each value, at the measured sizes
        self._given_bytes: list[int] = []  # of all inputs, likewise

    def learn(self, sizes: Sizes, recording: Recording, profile: planner.Profile) -> None:
        """Learn from a profile measured at these sizes, of which this is the recording, unless two are known."""
        if len(self._measured) < 2:
            self._measured[sizes] = profile
            self._channels.append(_channels(recording))
            self._given_bytes.append(_given_bytes(recording))

    def at(self, sizes: Sizes, recording: Recording) -> planner.Profile | None:
        """The profile at these sizes, of which this is the recording. None with profiles of fewer than two sizes.

        A codec is on offer if both profiles offer it. One that separates outliers is on offer only where the channels
        are the same at all sizes: channels that are positions have other outliers at every size.
        """
        if sizes in self._measured:
            return self._measured[sizes]
        if len(self._measured) < 2:
            return None
        known, (one, other) = Variables([each.lengths for each in self._measured]), self._measured.values()
        values = known.values_at(sizes.lengths)
        along = None
        if recording.is_whole:
            # Only the profiles tell the bytes of its last value.
            along = _Line(self._given_bytes, _given_bytes(recording), known, values)
            graph = whole_graph(recording, along.most([each.graph.values[-1].nbytes for each in (one, other)]))
        else:
            graph = block_graph(recording)
        between = _Between(one, other, graph, known, values, along)
        channels = zip(*self._channels, _channels(recording), strict=True)
        return between.profile([len(set(at_each)) == 1 for at_each in channels])


@dataclass(frozen=True)
class _Between:
    """Makes the profile of `graph` from `one` and the `other`, which were measured at two sizes.

    `variables` and `values`: as of `_Line`. `by_data`: of a block as one operator, of which data too decide the bytes:
    how these follow those of its inputs.
    """

    one: planner.Profile
    other: planner.Profile
    graph: planner.BlockGraph
    variables: Variables
    values: Sequence[int] | None
    by_data: _Line | None

    def profile(self, has_same_channels: Sequence[bool]) -> planner.Profile:
        """`has_same_channels`: of each value, whether it has the same channels at all sizes."""
        own = [self.by_data or self._line({*op.inputs, *op.outputs}) for op in self.graph.ops]
        everything = self.by_data or self._line(range(len(self.graph.values)))
        there, back = map(everything.at, zip(self.one.overlap_seconds, self.other.overlap_seconds, strict=True))
        return planner.Profile(
            graph=self._sized_graph(own, everything),
            op_seconds=tuple(map(_Line.at, own, zip(self.one.op_seconds, self.other.op_seconds, strict=True))),
            codecs=tuple(self._offers(value, is_same) for value, is_same in enumerate(has_same_channels)),
            overlap_seconds=(there, back),
            noise=max(self.one.noise, self.other.noise),
        )

    def _line(self, followed: Collection[int]) -> _Line:
        """How numbers follow the bytes of these values."""
        graphs = self.one.graph, self.other.graph, self.graph
        *measured, wanted = (sum(graph.values[v].nbytes for v in followed) for graph in graphs)
        return _Line(measured, wanted, self.variables, self.values)

    def _sized_graph(self, own: Sequence[_Line], everything: _Line) -> planner.BlockGraph:
        """The graph with the bytes that were measured. `own`: how those of each operator follow its values."""
        bytes_on = _Line.whole if self.by_data is None else _Line.most

        def by(along: _Line) -> units.By:
            # the first size is of the wanted graph, in which none is measured
            return dict.fromkeys((units.Bytes, units.DeductedBytes), lambda sizes: bytes_on(along, sizes[1:]))

        graphs = self.graph, self.one.graph, self.other.graph
        ops, events = zip(own, *(g.ops for g in graphs), strict=True), zip(*(g.events for g in graphs), strict=True)
        return replace(
            self.graph,
            ops=tuple(units.combined(each, by(along)) for along, *each in ops),
            events=tuple(units.combined(each, by(everything)).clipped for each in events),
            forward_overhead=bytes_on(everything, [graph.forward_overhead for graph in graphs[1:]]),
        )

    def _offers(self, value: int, has_same_channels: bool) -> tuple[planner.CodecCost, ...]:
        """What both profiles offer for a value."""
        along = self._line([value])
        by = {units.Bytes: along.whole, units.Seconds: along.at}
        by |= {units.Error: max, units.GradientError: max, units.Guarantee: all}
        both = planner.combined_offers((self.one.codecs[value], self.other.codecs[value]), by)
        return tuple(cost for cost in both if has_same_channels or not separates_outliers(cost.codec))


@dataclass(frozen=True)
class _Line:
    """Interpolates a number by the bytes that it follows: `measured` at the two sizes, `wanted` at another one.

    `variables`: the input sizes that differ between the measured ones; `values`: these sizes at the other one. None:
    the measured ones do not tell of it.
    """

    measured: Sequence[int]
    wanted: int
    variables: Variables
    values: Sequence[int] | None

    def at(self, numbers: Sequence[float]) -> float:
        """The number at the wanted bytes, on the line through the measured ones.

        The line never falls: more bytes do not take less time, whatever noise says.
        """
        (low, least), (high, most) = sorted(zip(self.measured, numbers, strict=True), key=itemgetter(0))
        if low == high:
            return max(numbers)
        slope = max((most - least) / (high - low), 0.0)
        return max(least + slope * (self.wanted - low), 0.0)

    def whole(self, numbers: Sequence[int]) -> int:
        """The whole number there: by a formula, or else on the line, rounded up."""
        number = None
        if self.values is not None and (formula := self.variables.proportional(numbers)) is not None:
            number = formula.at(self.values)
        return max(math.ceil(self.at(numbers)) if number is None else number, 0)

    def most(self, numbers: Sequence[int]) -> int:
        """The whole number there, where data decide as well: at least as many for each byte as at either size.

        Two sizes that are close tell little of how fast it grows.
        """
        pairs = zip(self.measured, numbers, strict=True)
        ratio = max((Fraction(number, each) for each, number in pairs if each), default=Fraction(0))
        return max(self.whole(numbers), math.ceil(ratio * self.wanted))


def _given_bytes(recording: Recording) -> int:
    return sum(value.geometry.span for value in recording.inputs)


def _channels(recording: Recording) -> tuple[int, ...]:
    return tuple(value.channels for value in recording.values)
