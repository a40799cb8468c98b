"""Tells when backward reaches a block, and with which gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

Arrived = Sequence[tuple[GradientEdge, torch.Tensor | None]]


def watch(output: Any, on_arrival: Callable[[Arrived], None]) -> Any:
    """The block's output, whose tensors tell `on_arrival` when their gradients arrive.

    It is told once, when backward reaches the block first: the edge of the autograd graph behind each tensor, and its
    gradient; None for a tensor on which the loss of this backward does not depend. The loss may never depend on some:
    many blocks return the weights of their attention, which few losses read.

    The output is returned as it is if none of it can be watched.
    """
    watched = outputs_to_watch(output)
    if not watched:
        return output
    # All of them through one node: the gradients that arrive, arrive together.
    known = dict(zip(map(id, watched), _Arrival.apply(on_arrival, *watched), strict=True))
    return pytree.tree_map(lambda leaf: known.get(id(leaf), leaf), output)


def outputs_to_watch(output: Any) -> list[torch.Tensor]:
    """The tensors of the output that backward may reach, and that can be replaced: those on the device of the largest.

    A tensor that shares memory with another one of the output stays as it is. Otherwise autograd would not notice that
    the program changes one of them by writing to the other.
    """
    owners = Counter(_storage(leaf) for leaf in _tensors(output))
    alone = [leaf for leaf in outputs_reached(output) if owners[_storage(leaf)] == 1]
    device = max(alone, key=torch.Tensor.numel).device if alone else None
    return [leaf for leaf in alone if leaf.device == device]


def outputs_reached(output: Any) -> list[torch.Tensor]:
    """The tensors of the output that backward may reach. What is in an object of an unknown class is not seen."""
    return [leaf for leaf in _tensors(output) if leaf.grad_fn is not None and leaf.is_floating_point()]


def _tensors(output: Any) -> list[torch.Tensor]:
    leaves = (leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))
    return list({id(leaf): leaf for leaf in leaves if leaf.layout is torch.strided}.values())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Arrival(torch.autograd.Function):
    """The identity. Its backward tells who waits for it, who must not know the graph: the graph knows them."""

    @staticmethod
    def forward(ctx: Any, on_arrival: Callable[[Arrived], None], *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.on_arrival = on_arrival
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        on_arrival, ctx.on_arrival = ctx.on_arrival, None
        if on_arrival is not None:  # in a second backward of the same graph there is nothing left to learn
            edges = [GradientEdge(*following) for following in ctx.next_functions]
            on_arrival(list(zip(edges, gradients, strict=True)))
        return None, *gradients
