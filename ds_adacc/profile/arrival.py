"""Tells when backward reaches a block, and with which gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from ds_adacc.program.geometry import storage_of

OnArrival = Callable[[GradientEdge, torch.Tensor], None]


class Entrance:
    """Through which output backward enters the blocks of one type.

    That is the largest output, unless no loss reads that: many blocks return the weights of their attention. After a
    pass that has watched an output in vain it is the next largest.
    """

    def __init__(self) -> None:
        self._place = 0
        self.is_reached = False
        self.is_probing = False  # while a call's gradient errors are measured, by backwards of their own

    def choose(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The output to watch, of those that can be."""
        return outputs[self._place % len(outputs)]

    def end_pass(self) -> None:
        """Note the end of a backward."""
        self._place += not self.is_reached
        self.is_reached = False


def watch(output: Any, inputs: Sequence[torch.Tensor], entrance: Entrance, on_arrival: OnArrival) -> Any:
    """The block's output, of which one tensor tells `on_arrival` when its gradient arrives.

    It is told once, when backward reaches the block first: the edge of the autograd graph behind the tensor, and the
    gradient. The other tensors stay as they are: a node that they shared would have backward run through all of them,
    though the loss may read one only. The output is returned as it is if none of it can be watched.
    """
    outputs = outputs_to_watch(output, inputs)
    if not outputs:
        return output
    watched = entrance.choose(outputs)
    known = _Arrival.apply(on_arrival, watched)
    known.__dict__.update(watched.__dict__)  # the block may have put an auxiliary loss there
    return pytree.tree_map(lambda leaf: known if leaf is watched else leaf, output)


def outputs_to_watch(output: Any, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of the output that backward may reach and that can be replaced, the largest first.

    Of those that share memory with another tensor of the output, only the largest can be. Autograd would not notice
    that the program changes one by writing to the other. What shares memory with an `input` is left out, since backward
    enters nothing of the block there. What is in an object of an unknown class is not seen.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    distinct = list({id(leaf): leaf for leaf in leaves if leaf.layout is torch.strided}.values())
    given = {storage_of(tensor) for tensor in inputs if tensor.layout is torch.strided}
    owners = Counter(map(storage_of, distinct))
    reached = [
        leaf
        for leaf in distinct
        if leaf.grad_fn is not None and leaf.is_floating_point() and storage_of(leaf) not in given
    ]
    reached.sort(key=torch.Tensor.numel, reverse=True)
    return [leaf for number, leaf in enumerate(reached) if number == 0 or owners[storage_of(leaf)] == 1]


class _Arrival(torch.autograd.Function):
    """The identity. Its backward calls `on_arrival`, which must not refer to the graph: the graph refers to it."""

    @staticmethod
    def forward(ctx: Any, on_arrival: OnArrival, output: torch.Tensor) -> torch.Tensor:
        ctx.on_arrival = on_arrival
        return output.detach()

    @staticmethod
    # pyrefly: ignore [bad-override]: torch gives a gradient for each output, so here one
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        on_arrival, ctx.on_arrival = ctx.on_arrival, None
        if on_arrival is not None:  # in a second backward of the same graph there is nothing left to learn
            on_arrival(GradientEdge(*ctx.next_functions[0]), gradient)
        return None, gradient
