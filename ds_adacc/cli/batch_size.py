"""Estimates peaks at other micro-batch sizes: each number of bytes grows on the line through two recorded sizes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ds_adacc import planner

Part = TypeVar("Part", planner.Value, planner.Op, planner.Event, planner.CodecCost)

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
                    "  which is not in proportion; the factory should return sequences of one length"
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
        codecs = tuple(self._codecs(batch, *offers) for offers in zip(a.codecs, b.codecs, strict=True))
        return replace(a, graph=self._graph(batch, a.graph, b.graph), codecs=codecs)

    def _graph(self, batch: int, a: planner.BlockGraph, b: planner.BlockGraph) -> planner.BlockGraph:
        return planner.BlockGraph(
            tuple(self._moved(batch, v, w, "nbytes") for v, w in zip(a.values, b.values, strict=True)),
            tuple(
                replace(self._moved(batch, o, p, "workspace_bytes"), replayable=o.replayable and p.replayable)
                for o, p in zip(a.ops, b.ops, strict=True)
            ),
            tuple(self._event(batch, e, f) for e, f in zip(a.events, b.events, strict=True)),
            self._bytes(batch, a.forward_overhead, b.forward_overhead),
            self._bytes(batch, a.carried_bytes, b.carried_bytes),
        )

    def _event(self, batch: int, a: planner.Event, b: planner.Event) -> planner.Event:
        fields = "gradient_bytes", "made_bytes", "late_bytes"
        return a.sized(**{field: self._bytes(batch, getattr(a, field), getattr(b, field)) for field in fields})

    def _codecs(
        self, batch: int, a: Sequence[planner.CodecCost], b: Sequence[planner.CodecCost]
    ) -> tuple[planner.CodecCost, ...]:
        others = {cost.codec: cost for cost in b}
        pairs = [(cost, others[cost.codec]) for cost in a if cost.codec in others]
        return tuple(
            self._moved(batch, cost, other, "nbytes", "workspace_bytes", "moved_bytes") for cost, other in pairs
        )

    def _moved(self, batch: int, a: Part, b: Part, *fields: str) -> Part:
        """`a` with these fields, in bytes, on the line through it and `b`."""
        return replace(a, **{field: self._bytes(batch, getattr(a, field), getattr(b, field)) for field in fields})

    def _bytes(self, batch: int, a: int, b: int) -> int:
        """The line through (batches[0], a) and (batches[1], b) at `batch`; no less than 0."""
        small, large = self.batches
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
