"""Estimates peaks at other micro-batch sizes: each number of bytes grows on the line through two recorded sizes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from ds_adacc import planner
from ds_adacc.planner import units

_MOST = 1 << 20  # samples; if so many fit, activations are no limit


class Incomparable(ValueError):
    """No line leads from one micro-batch size to the other: other programs run, or sequences have another length."""


@dataclass(frozen=True)
class BatchLine:
    """The same blocks recorded at two micro-batch sizes, the smaller one first; their block types have the same names.

    Raises Incomparable if block types, orders, values, operators or steps of backward are not the same at both, or if
    the largest input of a block is neither constant nor in proportion to the batch.
    """

    problems: tuple[planner.Problem, planner.Problem]
    batches: tuple[int, int]

    def __post_init__(self) -> None:
        small, large = self.batches
        shapes = [(problem.order, *map(_shape, problem.block_types)) for problem in self.problems]
        if shapes[0] != shapes[1]:
            raise Incomparable(f"at micro-batch {large} the blocks run other operators than at {small}")
        for at_small, at_large in zip(*map(_input_bytes, self.problems), strict=True):
            if at_small != at_large and at_small * large != at_large * small:
                raise Incomparable(
                    f"the input of a block takes {planner.human_bytes(at_small)} at micro-batch {small} and "
                    f"{planner.human_bytes(at_large)} at {large},\n"
                    "  which is not in proportion; your function must return sequences of one length"
                )

    def at(self, batch: int) -> planner.Problem:
        """The problem at `batch` samples: bytes by the line, rounded up, and all else as at the smaller size.

        Only what both recordings offer (codecs, replayable operators) is on offer.
        """
        pairs = zip(self.problems[0].block_types, self.problems[1].block_types, strict=True)
        block_types = (replace(a, profile=self._profile(batch, a.profile, b.profile)) for a, b in pairs)
        return replace(self.problems[0], block_types=tuple(block_types))

    def largest(self, policies: planner.Policies, budget: int) -> int | None:
        """The most samples with a peak of at most `budget` bytes under these policies; None if a million would fit."""

        def exceeds(batch: int) -> bool:
            return planner.peak_bytes(self.at(batch), policies) > budget

        if not exceeds(_MOST):
            return None
        return bisect_left(range(1, _MOST), True, key=exceeds)

    def _profile(self, batch: int, a: planner.Profile, b: planner.Profile) -> planner.Profile:
        line = partial(self._bytes, batch)
        by = {units.Bytes: line, units.DeductedBytes: line, units.Guarantee: all}
        graph = planner.BlockGraph.combined((a.graph, b.graph), by)
        graph = replace(graph, events=tuple(event.clipped for event in graph.events))
        codecs = tuple(planner.combined_offers(offers, by) for offers in zip(a.codecs, b.codecs, strict=True))
        return replace(a, graph=graph, codecs=codecs)

    def _bytes(self, batch: int, sizes: Sequence[int]) -> int:
        """The line through these bytes at the two `batches`, at `batch`; no less than 0."""
        (small, large), (a, b) = self.batches, sizes
        return max(0, a - (b - a) * (small - batch) // (large - small))


def _input_bytes(problem: planner.Problem) -> list[int]:
    """Bytes of the largest input of each block type. Smaller ones, such as offsets of packed texts, may have n + 1."""
    graphs = (block_type.profile.graph for block_type in problem.block_types)
    inputs = ([value.nbytes for value in graph.values if value.role == "block_input"] for graph in graphs)
    return [max(sizes, default=0) for sizes in inputs]


def _shape(block_type: planner.BlockType) -> tuple[object, ...]:
    """What must be the same at both sizes."""
    graph = block_type.profile.graph
    return (
        (block_type.name, block_type.count, block_type.calls_per_block),
        tuple((value.name, value.producer, value.storable) for value in graph.values),
        tuple((op.name, op.inputs, op.outputs) for op in graph.ops),
        tuple((event.name, event.values) for event in graph.events),
    )
