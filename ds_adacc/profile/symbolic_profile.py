"""The profile of a program at a size at which it was not measured: bytes by formula, seconds on a line."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from ds_adacc import planner
from ds_adacc.kernels import separates_outliers
from ds_adacc.profile.block_graph import block_graph
from ds_adacc.program.formula import Variables, fit
from ds_adacc.program.recording import Recording
from ds_adacc.program.signature import Sizes


class SymbolicProfile:
    """The profiles of one program, measured at several sizes of its inputs."""

    def __init__(self, sizes: Sizes, recording: Recording, profile: planner.Profile) -> None:
        self._measured: dict[Sizes, planner.Profile] = {}
        self._channels: list[tuple[int, ...]] = []  # of each value, at the measured sizes
        self.learn(sizes, recording, profile)

    @property
    def is_measured(self) -> bool:
        """Whether there are profiles of two sizes, which tell those of others."""
        return len(self._measured) > 1

    def learn(self, sizes: Sizes, recording: Recording, profile: planner.Profile) -> None:
        """Learn from a profile that was measured at these sizes, of which this is the recording."""
        self._measured[sizes] = profile
        self._channels.append(_channels(recording))

    def at(self, sizes: Sizes, recording: Recording) -> planner.Profile | None:
        """The profile at these sizes, of which this is the recording. None with profiles of fewer than two sizes.

        A codec is on offer if every profile offers it. One that separates outliers is on offer only where the channels
        are the same at all sizes: channels that are positions have other outliers at every size.
        """
        if sizes in self._measured:
            return self._measured[sizes]
        if not self.is_measured:
            return None
        profiles, graph = list(self._measured.values()), block_graph(recording)
        known = Variables([measured.lengths for measured in self._measured])
        values = known.of(sizes.lengths)

        def whole(numbers: Sequence[int], moved: Callable[[Sequence[float]], float]) -> int:
            formula = fit(numbers, known.seen)
            if formula is not None and formula.variables and formula.offset and len(numbers) < 3:
                formula = None  # a product with an offset fits any two numbers
            number = None if formula is None or values is None else formula.at(values)
            return max(math.ceil(moved(numbers)) if number is None else number, 0)

        def along(nbytes: Callable[[planner.BlockGraph], int]) -> Callable[[Sequence[float]], float]:
            """What follows these bytes, as a function of the numbers measured at each size."""
            at = [nbytes(profile.graph) for profile in profiles]
            return lambda numbers: _on_line(at, numbers, nbytes(graph))

        everything = along(_bytes_of_values)
        ops, seconds = [], []
        for index, op in enumerate(graph.ops):
            own = along(lambda graph, op=op: sum(graph.values[v].nbytes for v in {*op.inputs, *op.outputs}))
            seconds.append(own([profile.op_seconds[index] for profile in profiles]))
            taken = whole([profile.graph.ops[index].workspace_bytes for profile in profiles], own)
            ops.append(replace(op, workspace_bytes=taken))
        events = []
        for i, event in enumerate(graph.events):
            each = [(e.gradient_bytes, e.made_bytes, e.late_bytes) for e in (p.graph.events[i] for p in profiles)]
            events.append(event.sized(*(whole(numbers, everything) for numbers in zip(*each, strict=True))))
        overhead = whole([profile.graph.forward_overhead for profile in profiles], everything)
        graph = replace(graph, ops=tuple(ops), events=tuple(events), forward_overhead=overhead)
        codecs = []
        for v, at_each in enumerate(zip(*self._channels, _channels(recording), strict=True)):
            offered = [profile.codecs[v] for profile in profiles]
            if len(set(at_each)) > 1:
                offered = [[cost for cost in costs if not separates_outliers(cost.codec)] for costs in offered]
            codecs.append(_offers(offered, whole, along(lambda g, v=v: g.values[v].nbytes)))
        return planner.Profile(
            graph=graph,
            op_seconds=tuple(seconds),
            codecs=tuple(codecs),
            overlap_seconds=(
                everything([profile.overlap_seconds[0] for profile in profiles]),
                everything([profile.overlap_seconds[1] for profile in profiles]),
            ),
            noise=max(profile.noise for profile in profiles),
        )


def _offers(
    measured: Sequence[Sequence[planner.CodecCost]],
    whole: Callable[[Sequence[int], Callable[[Sequence[float]], float]], int],
    along: Callable[[Sequence[float]], float],
) -> tuple[planner.CodecCost, ...]:
    by_codec = [{cost.codec: cost for cost in costs} for costs in measured]
    offers = []
    for name in by_codec[0]:
        costs = [known[name] for known in by_codec if name in known]
        if len(costs) == len(measured):
            offers.append(
                planner.CodecCost(
                    codec=name,
                    nbytes=whole([cost.nbytes for cost in costs], along),
                    compress_seconds=along([cost.compress_seconds for cost in costs]),
                    decompress_seconds=along([cost.decompress_seconds for cost in costs]),
                    error=max(cost.error for cost in costs),
                    workspace_bytes=whole([cost.workspace_bytes for cost in costs], along),
                    lossless=all(cost.lossless for cost in costs),
                )
            )
    return tuple(offers)


def _channels(recording: Recording) -> tuple[int, ...]:
    return tuple(value.channels for value in recording.values)


def _bytes_of_values(graph: planner.BlockGraph) -> int:
    return sum(value.nbytes for value in graph.values)


def _on_line(at: Sequence[float], numbers: Sequence[float], wanted: float) -> float:
    """The number at `wanted`, on the line through the two examples with the least and the largest `at`.

    The line never falls: more bytes do not take less time, whatever noise says.
    """
    low, high = min(range(len(at)), key=at.__getitem__), max(range(len(at)), key=at.__getitem__)
    if at[low] == at[high]:
        return max(numbers)
    slope = max((numbers[high] - numbers[low]) / (at[high] - at[low]), 0.0)
    return max(numbers[low] + slope * (wanted - at[low]), 0.0)
