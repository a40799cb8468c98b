"""Autograd's graph of a block that was recorded, each node with the operator that it is of."""

from __future__ import annotations

import itertools
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.autograd.graph import Node

from ds_adacc.program.backward_graph import WRITE_TO_VIEW, BackwardGraph, BackwardNode, Edge
from ds_adacc.program.nodes import nodes_behind
from ds_adacc.program.recorded_op import RecordedOp
from ds_adacc.program.signature import flatten
from ds_adacc.record.gradient_flow import (
    fills_up,
    gets,
    gives_views,
    is_cast,
    is_leaf,
    is_passed_on,
    kind_of,
    node_of,
    parameter_of,
    targets,
    turns,
)


class _Call(NamedTuple):
    """A call of the dispatcher's. `began`: the number of the next node then. The node before that is the call's own.

    `op`: the operator that it has become, or None. `ops_done`: how many had run.
    """

    began: int
    op: int | None
    ops_done: int


class BackwardNodes:
    """The calls that may have made nodes. Autograd numbers its nodes, and makes one before the call's kernel runs."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._made: list[weakref.ref[torch.Tensor]] = []
        self._ops_done = 0

    def note(self, began: int, op: RecordedOp | None, made: Iterable[torch.Tensor]) -> None:
        """Note a call that has become the operator `op`, or none. `began`: the number of the next node before it.

        `made`: what it has returned, which is not kept alive.
        """
        self._made += map(weakref.ref, made)
        if op is None:
            self._calls.append(_Call(began, None, self._ops_done))
        else:
            self._calls.append(_Call(began, op.index, op.index))
            self._ops_done = op.index + 1

    def graph(self, output: Any, since: int) -> BackwardGraph:
        """The graph behind what the block has returned, or keeps otherwise: a module may have a loss as an attribute.

        `since`: as of `nodes_behind`.
        """
        ends = [(node, tensor.output_nr) for tensor in self._alive(output) if _is_since(node := node_of(tensor), since)]
        inside = self._in_order(nodes_behind((node for node, _ in ends), set(), since))
        given_to = dict.fromkeys(target for node in inside for target in targets(node) if target is not None)
        outside = [(node, place) for node, place in given_to if node not in inside]
        edges = {target: Edge(number, 0) for number, target in enumerate(outside)}
        for number, node in enumerate(inside, len(outside)):
            edges |= {(node, place): Edge(number, place) for place in range(len(gets(node)))}
        nodes = [_outside(node, place) for node, place in outside]
        nodes += (_inside(node, call, edges) for node, call in inside.items())
        return BackwardGraph(tuple(nodes), tuple(dict.fromkeys(edges[end] for end in ends)))

    def _alive(self, output: Any) -> list[torch.Tensor]:
        """What the block has returned, and what else its calls have made that is alive. A view's base is left out."""
        returned: list[torch.Tensor] = []
        flatten(output, returned, returned)
        known = {id(tensor) for tensor in returned}
        others = [tensor for made in self._made if (tensor := made()) is not None and id(tensor) not in known]
        bases = {id(tensor._base) for tensor in (*returned, *others) if tensor._is_view()}
        return [*returned, *(tensor for tensor in others if id(tensor) not in bases)]

    def _in_order(self, nodes: Iterable[Node]) -> dict[Node, _Call]:
        """The nodes that are no leaves, in the order in which they were made, and the call that each is of.

        The cast of a parameter comes before the node that reads it first. Autocast may have kept it from another call.
        Casts that no node reads come last: the block returns or keeps them.
        """
        found: dict[Node, _Call] = {}
        unread: dict[Node, _Call] = {}
        for node in sorted(itertools.filterfalse(is_leaf, nodes), key=_number):
            call = self._call_of(node)
            if is_cast(node):
                unread[node] = call._replace(op=None)
                continue
            for target in targets(node):
                if target is not None and is_cast(target[0]):
                    found.setdefault(target[0], call._replace(op=None))
            found[node] = call
        return {**found, **{cast: call for cast, call in unread.items() if cast not in found}}

    def _call_of(self, node: Node) -> _Call:
        """The call about to run when autograd made the node. It has no operator if the node is not its own."""
        number = _number(node)
        place = bisect_right(self._calls, number, key=lambda call: call.began)
        if kind_of(node) == WRITE_TO_VIEW and place:  # unlike others, it is made when the call has run
            return self._calls[place - 1]
        if place == len(self._calls):
            return _Call(number, None, self._ops_done)
        call = self._calls[place]
        return call if call.began == number + 1 else call._replace(op=None)


def _outside(node: Node, place: int) -> BackwardNode:
    """A node that others have made, and which of its gradients the block gives it."""
    return BackwardNode("", (gets(node)[place],), is_parameter=parameter_of(node) is not None)


def _inside(node: Node, call: _Call, edges: Mapping[tuple[Node, int], Edge]) -> BackwardNode:
    """A node that the block has made. `edges`: those to all nodes."""
    gives: list[Edge | None] = []
    for number, target in enumerate(targets(node)):
        if target is None:
            gives.append(None)
            continue
        is_same = is_passed_on(node, number, makes_nothing=call.op is None)
        is_whole = is_same and not gives_views(node)
        gives.append(replace(edges[target], is_passed_on=is_same, is_turned=turns(node), is_whole=is_whole))
    return BackwardNode(kind_of(node), gets(node), tuple(gives), call.op, call.ops_done, fills_up=fills_up(node))


def _number(node: Node) -> int:
    return node._sequence_nr()


def _is_since(node: Node | None, since: int) -> TypeGuard[Node]:
    return node is not None and not is_leaf(node) and _number(node) >= since
