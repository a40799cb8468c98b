"""One graph from several of one block type, none of which takes more than it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ds_adacc import planner
from ds_adacc.planner import units


def merged_graph(graphs: Sequence[planner.BlockGraph]) -> planner.BlockGraph:
    """The graph with the most bytes, but each operator and each step of backward is that which takes the most."""
    largest = max(graphs, key=lambda graph: sum(value.nbytes for value in graph.values))
    ops = (max(each, key=lambda op: op.workspace_bytes) for each in zip(*(g.ops for g in graphs), strict=True))
    by = {units.Bytes: max, units.DeductedBytes: min}  # what is made or late is beside less, so the least counts
    events = (units.combined(each, by).clipped for each in zip(*(g.events for g in graphs), strict=True))
    frees = all(graph.frees_stored for graph in graphs)
    return replace(largest, ops=tuple(ops), events=tuple(events), frees_stored=frees)
