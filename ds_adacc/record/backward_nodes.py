"""Autograd's graph of a block that was recorded, each node with the operator that it is of."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from ds_adacc.program.backward_graph import BackwardGraph, BackwardNode, Edge, Gradient
from ds_adacc.program.nodes import nodes_behind
from ds_adacc.program.parameters import whole_shape
from ds_adacc.program.recorded_op import RecordedOp
from ds_adacc.program.signature import flatten

# What these give is what they get, if that looks as it should: else it is summed up, or cast.
_PASS_ON = {
    "AddBackward0",
    "AliasBackward0",
    "CloneBackward0",
    "ConjBackward0",
    "ExpandBackward0",
    "PermuteBackward0",
    "ReshapeAliasBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "SqueezeBackward2",
    "SubBackward0",
    "TBackward0",
    "ToCopyBackward0",
    "TransposeBackward0",
    "TransposeBackward1",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewAsComplexBackward0",
    "ViewAsRealBackward0",
    "ViewBackward0",
}
_GIVE_VIEWS = {"CatBackward0", "StackBackward0"}  # of what they get
_AFTERWARDS = "CopySlices"  # made when a write to a view has run, unlike all others


class _Call(NamedTuple):
    """A call of the dispatcher's. `began`: the number of the next node then. The node before that is the call's own."""

    began: int
    op: int | None
    ops_done: int


class BackwardNodes:
    """The calls that may have made nodes. Autograd numbers its nodes, and makes one before the call's kernel runs."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._ops_done = 0

    def note(self, began: int, op: RecordedOp | None) -> None:
        """Note a call that has become the operator `op`, or none. `began`: the number of the next node before it."""
        if op is None:
            self._calls.append(_Call(began, None, self._ops_done))
        else:
            self._calls.append(_Call(began, op.index, op.index))
            self._ops_done = op.index + 1

    def graph(self, output: Any, since: int) -> BackwardGraph:
        """The graph behind the tensors that the block has returned. `since`: as of `nodes_behind`."""
        tensors: list[torch.Tensor] = []
        flatten(output, tensors, tensors)
        ends = list(dict.fromkeys((t.grad_fn, t.output_nr) for t in tensors if _is_of_block(t.grad_fn, since)))
        inside = self._in_order(nodes_behind((node for node, _ in ends), set(), since))
        given_to = dict.fromkeys(each for node in inside for each in node.next_functions if each[0] is not None)
        outside = [(node, place) for node, place in given_to if node not in inside]
        edges = {target: Edge(number, 0) for number, target in enumerate(outside)}
        for number, node in enumerate(inside, len(outside)):
            edges |= {(node, place): Edge(number, place) for place in range(len(_gets(node)))}
        nodes = [BackwardNode("", (_gets(node)[place],), is_parameter=_is_parameter(node)) for node, place in outside]
        for node, call in inside.items():
            gives = tuple(_given(node, call, edges))
            nodes.append(BackwardNode(type(node).__name__, _gets(node), gives, call.op, call.ops_done))
        return BackwardGraph(tuple(nodes), tuple(edges[end] for end in ends))

    def _in_order(self, nodes: Iterable[Node]) -> dict[Node, _Call]:
        """The nodes that are no leaves, in the order in which they were made, and the call that each is of.

        The cast of a parameter comes before the node that reads it first. Autocast may have kept it from another call.
        """
        found: dict[Node, _Call] = {}
        for node in sorted((each for each in nodes if not _is_leaf(each) and not _is_cast(each)), key=_number):
            call = self._call_of(node)
            for cast, _ in node.next_functions:
                if cast is not None and _is_cast(cast):
                    found.setdefault(cast, call._replace(op=None))
            found[node] = call
        return found

    def _call_of(self, node: Node) -> _Call:
        """The call about to run when autograd made the node. It has no operator if the node is not its own."""
        number = _number(node)
        place = bisect_right(self._calls, number, key=lambda call: call.began)
        if type(node).__name__ == _AFTERWARDS and place:
            return self._calls[place - 1]
        if place == len(self._calls):
            return _Call(number, None, self._ops_done)
        call = self._calls[place]
        return call if call.began == number + 1 else call._replace(op=None)


def _given(node: Node, call: _Call, edges: Mapping[tuple[Node, int], Edge]) -> Iterator[Edge | None]:
    """The edges along which it gives gradients."""
    for number, target in enumerate(node.next_functions):
        edge = None if target[0] is None else edges[target]
        yield edge and replace(edge, is_passed_on=_is_passed_on(node, call, number))


def _is_passed_on(node: Node, call: _Call, number: int) -> bool:
    """Whether the gradient `number` that it gives is the one that it gets, or a view of that."""
    name, (to, place) = type(node).__name__, node.next_functions[number]
    if name in _GIVE_VIEWS:
        return True
    # ZeRO-3 has Functions around modules that return what they are given.
    is_candidate = call.op is None if isinstance(node, BackwardCFunction) else name in _PASS_ON
    if not is_candidate or (number == 1 and (name == "SubBackward0" or getattr(node, "_saved_alpha", 1) != 1)):
        return False
    got, given = _gets(node)[0], _gets(to)[place]
    return (got.nbytes, got.dtype) == (given.nbytes, given.dtype)


def _number(node: Node) -> int:
    return node._sequence_nr()


def _is_of_block(node: Node | None, since: int) -> TypeGuard[Node]:
    return node is not None and not _is_leaf(node) and _number(node) >= since


def _is_leaf(node: Node) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def _is_parameter(node: Node) -> bool:
    return _is_leaf(node) and isinstance(node.variable, nn.Parameter)


def _is_cast(node: Node) -> bool:
    return type(node).__name__ == "ToCopyBackward0" and _is_parameter(node.next_functions[0][0])


def _gets(node: Node) -> tuple[Gradient, ...]:
    if _is_parameter(node):  # of which ZeRO-3 may have but a part here now
        return (Gradient(whole_shape(node.variable), node.variable.dtype),)
    return tuple(Gradient(tuple(each.shape), each.dtype) for each in node._input_metadata)
