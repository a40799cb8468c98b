"""Autograd's nodes behind a tensor, and the compiled graphs that they are of."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import Any

from torch.autograd.graph import Node

from ds_adacc.program.graphs import GraphRun, run_of
from ds_adacc.program.signature import tensors_held_by


def graphs_behind(output: Any, since: int) -> tuple[GraphRun, ...]:
    """The calls of graphs that have made the tensors in `output`, in the order in which they ran.

    Autograd's nodes tell, which it numbers as it makes them. `since`: the number of the next one when the block began
    (`torch.autograd._get_sequence_nr`). Older nodes, behind the tensors that the block was given or has read, are not
    visited.
    """
    found = []
    for node in nodes_behind((tensor.grad_fn for tensor in tensors_held_by(output)), set(), since):
        run = run_of(node)
        if run is not None:
            found.append((node._sequence_nr(), run))
    return tuple(run for _, run in sorted(found, key=itemgetter(0)))


def nodes_behind(ends: Iterable[Node | None], met: set[Node], since: int = 0) -> Iterable[Node]:
    """The nodes of the autograd graph at `ends` and all that these lead to, each once, without those already `met`.

    Nor those with a number below `since`, and what these lead to.
    """
    pending = list(ends)
    while pending:
        node = pending.pop()
        if node is not None and node not in met and node._sequence_nr() >= since:
            met.add(node)
            pending.extend(following for following, _ in node.next_functions)
            yield node
