"""Autograd's graph of a block that was recorded, each node with the operator that it is of."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.autograd.graph import Node

from ds_adacc.program.backward_graph import WRITE_TO_VIEW, BackwardGraph, BackwardNode, Edge
from ds_adacc.program.nodes import nodes_behind
from ds_adacc.program.recorded_op import RecordedOp
from ds_adacc.program.signature import tensors_held_by
from ds_adacc.record.gradient_flow import (
    gets,
    gives_views,
    is_cast,
    is_leaf,
    is_passed_on,
    kind_of,
    makes_zeros,
    node_of,
    parameter_of,
    targets,
    transposes,
)


class _Call(NamedTuple):
    """A call of the dispatcher's. `began`: the number of the next node then. The node before that is the call's own.

    `op`: the operator that it has become; None: a view, a cast that counts elsewhere, or a Function that makes nothing.
    `ops_done`: how many had run.
    """

    began: int
    op: int | None
    ops_done: int


class BackwardNodes:
    """The calls that may have made nodes. Autograd numbers its nodes, and makes one before the call's kernel runs."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._ops_done = 0
        self._views: set[Hashable] = set()  # the views that the last call has written to, as `_look` tells them

    def note(self, began: int, op: RecordedOp | None, written: Sequence[torch.Tensor]) -> None:
        """Note a call that has become the operator `op`, or none. `began`: the number of the next node before it.

        `written`: the tensors that it has written to.
        """
        self._views = {_look(tensor) for tensor in written if tensor._is_view()}
        if op is None:
            self._calls.append(_Call(began, None, self._ops_done))
        else:
            self._calls.append(_Call(began, op.index, op.index))
            self._ops_done = op.index + 1

    def saver(self, tensor: torch.Tensor, ops_done: int) -> int:
        """The operator whose node is saving this tensor now. `ops_done`: how many have run.

        It is the next one if autograd has made a node since the last call, and else that call's own, which saves what
        it has made. If that is a view, autograd first makes a node for the whole and another one for the view.
        """
        last = self._calls[-1] if self._calls else None
        if last is None or last.op is None:
            return ops_done
        made_since = torch.autograd._get_sequence_nr() - last.began
        is_own = made_since == 0 or (made_since == 2 and _look(tensor) in self._views)
        return last.op if is_own else ops_done

    def graph(self, output: Any, since: int) -> BackwardGraph:
        """The graph behind what the block has returned. `since`: as of `nodes_behind`.

        What the block keeps otherwise, a loss for later say, is left out: one rank alone may do so.
        """
        ends = [(node, each.output_nr) for each in tensors_held_by(output) if _is_since(node := node_of(each), since)]
        made = self._calls_by_node(nodes_behind((node for node, _ in ends), set(), since))
        reached = dict.fromkeys(target for node in made for target in targets(node) if target is not None)
        outside = [(node, place) for node, place in reached if node not in made]
        edges = {target: Edge(number, 0) for number, target in enumerate(outside)}
        for number, node in enumerate(made, len(outside)):
            edges.update(((node, place), Edge(number, place)) for place in range(len(gets(node))))
        nodes = [_outside(node, place) for node, place in outside]
        nodes += (_made(node, call, edges) for node, call in made.items())
        return BackwardGraph(tuple(nodes), tuple(dict.fromkeys(edges[end] for end in ends)))

    def _calls_by_node(self, nodes: Iterable[Node]) -> dict[Node, _Call]:
        """The nodes that are no leaves, in the order in which they were made, and the call that each is of.

        The cast of a parameter comes before the node that reads it first. Autocast may have kept it from another call.
        Casts that no node reads come last: the block returns them. The nodes of a view of what was written to by
        another view come before the first node that reads it, too: autograd makes them only while it makes that.
        """
        found: dict[Node, _Call] = {}
        unread: dict[Node, _Call] = {}
        for node in sorted(itertools.filterfalse(is_leaf, nodes), key=_number):
            if node in found:
                continue
            late = _made_later(node)
            call = self._call_of(node, len(late))
            if is_cast(node):
                unread[node] = call._replace(op=None)
                continue
            for behind in late:
                found.setdefault(behind, call._replace(op=None))
            for target in targets(node):
                if target is not None and is_cast(target[0]):
                    found.setdefault(target[0], call._replace(op=None))
            found[node] = call
        return {**found, **{cast: call for cast, call in unread.items() if cast not in found}}

    def _call_of(self, node: Node, late: int) -> _Call:
        """The call about to run when autograd made the node. It has no operator if the node is not its own.

        `late`: how many nodes behind it were made after it.
        """
        number = _number(node)
        place = bisect_right(self._calls, number, key=lambda call: call.began)
        if kind_of(node) == WRITE_TO_VIEW and place:  # unlike others, it is made when the call has run
            return self._calls[place - 1]
        if place == len(self._calls):
            return _Call(number, None, self._ops_done)
        call = self._calls[place]
        return call if call.began == number + 1 + late else call._replace(op=None)


def _outside(node: Node, place: int) -> BackwardNode:
    """A node that others have made, which the block gives the gradient `place` of those that it gets.

    It has no kind: the program is the same whoever has made what the block is given.
    """
    return BackwardNode("", (gets(node)[place],), is_parameter=parameter_of(node) is not None)


def _made(node: Node, call: _Call, edges: Mapping[tuple[Node, int], Edge]) -> BackwardNode:
    """A node that the block has made. `edges`: those to all nodes."""
    gives: list[Edge | None] = []
    for number, target in enumerate(targets(node)):
        if target is None:
            gives.append(None)
            continue
        is_same = is_passed_on(node, number, makes_nothing=call.op is None)
        is_whole = is_same and not gives_views(node)
        gives.append(replace(edges[target], is_passed_on=is_same, is_turned=transposes(node), is_whole=is_whole))
    return BackwardNode(kind_of(node), gets(node), tuple(gives), call.op, call.ops_done, makes_zeros=makes_zeros(node))


def _made_later(node: Node) -> list[Node]:
    """The nodes behind this one that were made after it, in the order in which they were made."""
    behind = (target[0] for target in targets(node) if target is not None)
    later = nodes_behind(behind, set(), since=_number(node) + 1)
    return sorted(itertools.filterfalse(is_leaf, later), key=_number)


def _look(tensor: torch.Tensor) -> Hashable:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _number(node: Node) -> int:
    return node._sequence_nr()


def _is_since(node: Node | None, since: int) -> TypeGuard[Node]:
    return node is not None and not is_leaf(node) and _number(node) >= since
