"""Where the values and operators of a block are drawn: in layers, forward from top to bottom."""

from __future__ import annotations

from dataclasses import dataclass

from ds_adacc.planner import BlockGraph

Place = tuple[float, float]  # column, row; row 0 is the top


@dataclass(frozen=True)
class Layers:
    """Places of values and operators. Values are in whole rows, operators half a row above what they make."""

    values: tuple[Place, ...]
    ops: tuple[Place, ...]

    @classmethod
    def of(cls, graph: BlockGraph) -> Layers:
        """Each operator is below all values that it reads, in the column of the leftmost one if that is free."""
        depths = _depths(graph)
        rows = _rows(graph, depths)
        values: dict[int, Place] = {}
        ops: dict[int, Place] = {}
        for row in range(max([0, *depths, *rows]) + 1):
            free = 0
            leads = {op: _lead(graph, op, values) for op, depth in enumerate(depths) if depth == row}
            for op, lead in sorted(leads.items(), key=lambda item: item[1]):
                free = max(free, lead)
                ops[op] = free, row - 0.5
                values |= {value: (free + n, row) for n, value in enumerate(graph.ops[op].outputs)}
                free += max(1, len(graph.ops[op].outputs))
            sources = [v for v, value in enumerate(graph.values) if value.producer is None and rows[v] == row]
            values |= {value: (free + n, row) for n, value in enumerate(sources)}
        return cls(tuple(values[v] for v in range(len(values))), tuple(ops[op] for op in range(len(ops))))


def _depths(graph: BlockGraph) -> list[int]:
    """For each operator, the length of the longest chain of operators that ends with it."""
    depths: list[int] = []
    for op in graph.ops:
        producers = [graph.values[value].producer for value in op.inputs]
        depths.append(1 + max([depths[producer] for producer in producers if producer is not None], default=0))
    return depths


def _rows(graph: BlockGraph, depths: list[int]) -> list[int]:
    """For each value its row. A value that no operator makes is in the row above its first reader."""
    first: dict[int, int] = {}
    for op, depth in zip(graph.ops, depths, strict=True):
        for value in op.inputs:
            first[value] = min(depth, first.get(value, depth))
    return [
        first.get(index, 1) - 1 if value.producer is None else depths[value.producer]
        for index, value in enumerate(graph.values)
    ]


def _lead(graph: BlockGraph, op: int, values: dict[int, Place]) -> int:
    return min((int(values[value][0]) for value in graph.ops[op].inputs), default=0)
