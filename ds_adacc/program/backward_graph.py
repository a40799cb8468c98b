"""The graph along which autograd runs a block's backward: nodes that pass on gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

import torch

RESHAPES = ("ViewBackward0", "UnsafeViewBackward0")  # the kinds of the nodes of `view` and `reshape`
AS_STRIDED = "AsStridedBackward0"  # the kind of the node of `as_strided`
SUMS = ("AddBackward0", "SubBackward0")  # the kinds of which a constant decides what is passed on (`alpha`)
WRITE_TO_VIEW = "CopySlices"  # the kind of the node that autograd makes when a write to a view has run


@dataclass(frozen=True)
class Gradient:
    """How the gradient looks that a node gets: as the tensor of forward that it is of."""

    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Edge:
    """Where a gradient goes to: the gradient `place` of those that node `node` gets, to which others may be added.

    `is_passed_on`: it is no new tensor, but the one that the giving node gets, or a view of that. `is_turned`: a view
    with other strides, to which nothing is added in place. `is_whole`: it is passed on only where it has as many bytes
    as that. Else it is the sum of that along some dimensions, which is a new tensor.
    """

    node: int
    place: int
    is_passed_on: bool = False
    is_turned: bool = False
    is_whole: bool = False


@dataclass(frozen=True)
class BackwardNode:
    """A node of autograd's graph.

    `gets`: the gradients that it gets, one for each output of the call that has made it. `gives`: where those go to
    that it makes; None: that one is not asked for. `op`: the operator whose backward step it is, None if it is that of
    a view. `ops_done`: how many operators had run when it was made. `is_parameter`: it adds to a parameter's `.grad`.
    `makes_zeros`: in place of each gradient that does not arrive it makes zeros.
    """

    kind: str
    gets: tuple[Gradient, ...]
    gives: tuple[Edge | None, ...] = ()
    op: int | None = None
    ops_done: int = 0
    is_parameter: bool = False
    makes_zeros: bool = False


@dataclass(frozen=True)
class BackwardGraph:
    """The nodes in the order in which autograd has made them. Backward visits them in the opposite order.

    First come those that the block has not made, at which its backward ends: they give nothing. `ends`: the edges along
    which the gradients of what the block returns arrive.
    """

    nodes: tuple[BackwardNode, ...] = ()
    ends: tuple[Edge, ...] = ()

    @property
    def bytes_of_outputs(self) -> int:
        """Bytes of the gradients with which backward begins."""
        return sum(self.nodes[end.node].gets[end.place].nbytes for end in self.ends)

    @functools.cached_property
    def writes_to_views(self) -> frozenset[int]:
        """The operators that write to a view of a tensor that has a gradient."""
        return frozenset(node.op for node in self.nodes if node.kind == WRITE_TO_VIEW and node.op is not None)

    @functools.cached_property
    def strided(self) -> frozenset[int]:
        """The operators whose backward step gets a view that is not contiguous: of a larger gradient, or a turned one.

        What several nodes give is added up, and what passes through a `view` is copied if it must be.
        """
        arriving: dict[tuple[int, int], list[tuple[int, Edge]]] = {}
        for index, node in enumerate(self.nodes):
            for edge in node.gives:
                if edge is not None:
                    arriving.setdefault((edge.node, edge.place), []).append((index, edge))
        found: set[int] = set()
        for index in reversed(range(len(self.nodes))):
            edges = arriving.get((index, 0), [])
            if len(edges) != 1 or self.nodes[index].kind in RESHAPES:
                continue
            giver, edge = edges[0]
            if not self.passes_on(self.nodes[giver], edge):
                continue
            is_part = self.nodes[giver].gets[0].nbytes != self.nodes[index].gets[0].nbytes
            if is_part or edge.is_turned or giver in found:
                found.add(index)
        return frozenset(op for index in found if (op := self.nodes[index].op) is not None)

    def passes_on(self, node: BackwardNode, edge: Edge) -> bool:
        """Whether the gradient that `node` gives along `edge` is no new tensor at these sizes."""
        is_as_large = self.nodes[edge.node].gets[edge.place].nbytes == node.gets[0].nbytes
        return edge.is_passed_on and (is_as_large or not edge.is_whole)

    @property
    def structure(self) -> Hashable:
        """All but the sizes of the gradients, and what follows from these, from the kinds and from constants."""
        of_nodes = (
            (
                node.kind,
                tuple(gradient.dtype for gradient in node.gets),
                tuple(edge and (edge.node, edge.place) for edge in node.gives),
                (node.op, node.ops_done, node.is_parameter, node.makes_zeros),
            )
            for node in self.nodes
        )
        return tuple(of_nodes), tuple((edge.node, edge.place) for edge in self.ends)

    @property
    def sizes(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The sizes of the gradients that each node gets."""
        return tuple(tuple(gradient.size for gradient in node.gets) for node in self.nodes)

    def with_sizes(self, sizes: Iterable[Iterable[tuple[int, ...]]]) -> BackwardGraph:
        """The graph with these sizes, in the order of `sizes`."""
        nodes = tuple(
            replace(node, gets=tuple(replace(old, size=size) for old, size in zip(node.gets, its, strict=True)))
            for node, its in zip(self.nodes, sizes, strict=True)
        )
        return replace(self, nodes=nodes)
