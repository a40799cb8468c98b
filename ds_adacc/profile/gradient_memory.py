"""The memory that gradients take at each step of a block's backward: autograd's graph, run without tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ds_adacc.program.backward_graph import AS_STRIDED, RESHAPES, SUMS, BackwardGraph, BackwardNode, Edge


@dataclass(frozen=True)
class Step:
    """Bytes of the gradients at the step of a node, or of an operator.

    `arriving`: those alive when it begins. `during`: with those that it makes. `after`: the most from its end until the
    next step begins, while what it has made is added to other gradients.
    """

    arriving: int
    during: int
    after: int


class GradientMemory:
    """The steps of a `BackwardGraph`.

    `left`: bytes of the gradients with which backward ends. `makers`: the operators whose step makes a gradient, and
    does not only pass one on. They are the same at all sizes, and with all constants: so are events.
    """

    def __init__(self, graph: BackwardGraph) -> None:
        run = _Run(graph)
        self.makers: list[int] = []
        self._steps: list[tuple[float, Step]] = []  # in the order of backward; first, between which operators it is
        for index in reversed(range(len(graph.nodes))):
            node = graph.nodes[index]
            if not node.gives:
                continue
            makes = any(edge is not None and not edge.is_passed_on for edge in node.gives)
            if node.op is not None and node.kind not in SUMS and makes and run.is_reached(index):
                self.makers.append(node.op)
            step = run.step(index)
            self._steps.append((node.ops_done - 0.5 if node.op is None else node.op, step))
        self.left = run.total

    def steps(self, ops: Iterable[int]) -> Mapping[int, Step]:
        """The steps of these operators.

        What other nodes take, such as those of views, counts as what comes after the operator's step before them. An
        operator without a node has the step of the node that runs next.
        """
        found: dict[int, Step] = {}
        waiting = sorted(set(ops))
        last, most_before = None, 0
        for place, step in self._steps:
            is_own = False
            while waiting and place <= waiting[-1]:
                last = waiting.pop()
                is_own = place == last
                found[last] = Step(step.arriving, max(step.during, most_before), step.after if is_own else 0)
                most_before = 0
            most = max(step.during, step.after)
            if last is None:
                most_before = max(most_before, most)
            elif not is_own:
                found[last] = replace(found[last], after=max(found[last].after, most))
        return {**found, **{op: Step(self.left, self.left, self.left) for op in reversed(waiting)}}


class _Run:
    """Runs one node after the other as autograd's engine does. `total`: the bytes of all gradients alive.

    A node holds what it gets while it runs, and lets go of that before what it gives is added to what others have
    given. A sum takes the place of what was there before, unless another gradient shares that memory, or it is a view
    with other strides, or of a larger one (`accumulate` in torch/csrc/autograd/input_buffer.cpp). What a parameter gets
    is gone as soon as it has got all: its `.grad` is not counted here.
    """

    def __init__(self, graph: BackwardGraph) -> None:
        self._graph, self._nodes = graph, graph.nodes
        self._waiting: dict[tuple[int, int], int] = {}  # by node and place, the memory of the gradient that is there
        self._nbytes: list[int] = []  # by memory
        self._users: Counter[int] = Counter()  # by memory, how many hold it
        self._turned: set[int] = set()  # those that are seen with other strides
        self.total = 0
        given = (edge for node in graph.nodes for edge in node.gives if edge is not None)
        self._to_come = Counter((edge.node, edge.place) for edge in (*given, *graph.ends))
        for end in graph.ends:
            self._deliver(end, self._allocate(self._size(end)))

    def is_reached(self, index: int) -> bool:
        """Whether any gradient has arrived at this node."""
        return any((index, place) in self._waiting for place in range(len(self._nodes[index].gets)))

    def step(self, index: int) -> Step:
        """Run this node."""
        node, arriving = self._nodes[index], self.total
        here = [place for place in range(len(node.gets)) if (index, place) in self._waiting]
        got = [self._waiting.pop((index, place)) for place in here]
        if not got:
            return Step(arriving, arriving, arriving)
        if node.makes_zeros:
            missing = (place for place in range(len(node.gets)) if place not in here)
            got += [self._allocate(node.gets[place].nbytes) for place in missing]
        given = [(edge, self._give(node, edge, got[0])) for edge in node.gives if edge is not None]
        during = self.total + self._workspace(node)
        for memory in got:
            self._release(memory)
        return Step(arriving, during, max([self._deliver(edge, memory) for edge, memory in given], default=self.total))

    def _give(self, node: BackwardNode, edge: Edge, got: int) -> int:
        if not self._graph.passes_on(node, edge) or self._is_copied(node, got):
            return self._allocate(self._size(edge))
        self._users[got] += 1
        if edge.is_turned:
            self._turned.add(got)
        return got

    def _is_copied(self, node: BackwardNode, got: int) -> bool:
        """Whether the node of a `view` copies the gradient, because that has other strides.

        Not every such view needs a copy, and which one does is not known here: the first one counts.
        """
        return node.kind in RESHAPES and got in self._turned

    def _workspace(self, node: BackwardNode) -> int:
        """Bytes that a node takes besides what it makes.

        Where elements of an `as_strided` overlap, its node adds up their gradients by index. It makes an index of eight
        bytes for each element of the view and of the whole (`as_strided_backward` in
        torch/csrc/autograd/FunctionsManual.cpp).
        """
        if node.kind != AS_STRIDED:
            return 0
        part, edges = node.gets[0].numel, (edge for edge in node.gives if edge is not None)
        wholes = (self._nodes[edge.node].gets[edge.place].numel for edge in edges)
        return sum(8 * (part + whole) for whole in wholes if part > whole)

    def _deliver(self, edge: Edge, memory: int) -> int:
        """Put a gradient where it waits for others. Returns the most bytes alive meanwhile."""
        place, most = (edge.node, edge.place), self.total
        before = self._waiting.pop(place, None)
        if before is not None:
            other, memory = memory, before
            if not self._may_be_added_to(before, edge):
                memory = self._allocate(self._size(edge))
                most = self.total
                self._release(before)
            self._release(other)
        self._to_come[place] -= 1
        if self._nodes[edge.node].is_parameter and not self._to_come[place]:
            self._release(memory)
        else:
            self._waiting[place] = memory
        return most

    def _may_be_added_to(self, memory: int, edge: Edge) -> bool:
        is_whole = self._nbytes[memory] == self._size(edge)
        return is_whole and self._users[memory] == 1 and memory not in self._turned

    def _size(self, edge: Edge) -> int:
        return self._nodes[edge.node].gets[edge.place].nbytes

    def _allocate(self, nbytes: int) -> int:
        memory = len(self._nbytes)
        self._nbytes.append(nbytes)
        self._users[memory] = 1
        self.total += nbytes
        return memory

    def _release(self, memory: int) -> None:
        self._users[memory] -= 1
        if not self._users[memory]:
            self.total -= self._nbytes[memory]
