"""Autograd's nodes behind a tensor, and the compiled graphs that they are of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

from ds_adacc.program.graphs import GraphRun, run_of
from ds_adacc.program.signature import flatten


def graphs_behind(output: Any, inputs: Sequence[torch.Tensor]) -> tuple[GraphRun, ...]:
    """The calls of graphs that have made the tensors in `output`, in the order in which they ran.

    Autograd's nodes tell, from `output` back to `inputs`. Where the block reads a tensor that it was not given, they
    lead on, to graphs of other blocks too.
    """
    tensors: list[torch.Tensor] = []
    flatten(output, tensors, tensors)
    starts = {get_gradient_edge(tensor).node for tensor in inputs if tensor.requires_grad}
    found = []
    for node in nodes_behind((tensor.grad_fn for tensor in tensors), starts):
        run = run_of(node)
        if run is not None:
            found.append((node._sequence_nr(), run))
    return tuple(run for _, run in sorted(found, key=itemgetter(0)))


def nodes_behind(ends: Iterable[Node | None], met: set[Node]) -> Iterable[Node]:
    """The nodes of the autograd graph at `ends` and all that these lead to, each once, without those already `met`."""
    pending = list(ends)
    while pending:
        node = pending.pop()
        if node is not None and node not in met:
            met.add(node)
            pending.extend(following for following, _ in node.next_functions)
            yield node
