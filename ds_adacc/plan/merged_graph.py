"""What is known of a block type beside its own recording: what it takes on other ranks, and what it lends to others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ds_adacc import planner
from ds_adacc.planner import units


def merged_graph(graphs: Sequence[planner.BlockGraph]) -> planner.BlockGraph:
    """The graph with the most bytes, but each operator and each step of backward is that which takes the most."""
    lent = {index for graph in graphs for index, value in enumerate(graph.values) if value.lent}
    asked = {index for graph in graphs for index in graph.saved if not graph.values[index].lent}
    graphs = [lending(graph, lent, asked) for graph in graphs]
    largest = max(graphs, key=lambda graph: sum(value.nbytes for value in graph.values))
    ops = (max(each, key=lambda op: op.workspace_bytes) for each in zip(*(g.ops for g in graphs), strict=True))
    by = {units.Bytes: max, units.DeductedBytes: min}  # what is made or late is beside less, so the least counts
    events = (units.combined(each, by).clipped for each in zip(*(g.events for g in graphs), strict=True))
    frees = all(graph.frees_stored for graph in graphs)
    carried = max(graph.carried_bytes for graph in graphs)
    return replace(largest, ops=tuple(ops), events=tuple(events), carried_bytes=carried, frees_stored=frees)


def lending(graph: planner.BlockGraph, lent: Collection[int], asked: Collection[int] = ()) -> planner.BlockGraph:
    """The graph in which the values `lent` are lent (`planner.Value.lent`), unless a backward asks for them.

    `asked`: the backward of this block, or of another one that is given the value, asks for these. They are not lent.
    The last event lists both.
    """
    new = {*lent, *asked}.difference(graph.saved)
    values = (
        replace(value, lent=(value.lent or index in new) and index not in asked)
        for index, value in enumerate(graph.values)
    )
    last = [replace(event, values=(*event.values, *sorted(new))) for event in graph.events[-1:]]
    return replace(graph, values=tuple(values), events=(*graph.events[:-1], *last))
