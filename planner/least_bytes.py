"""The least bytes that a budget must allow, found without the solver: a bound that no policies can go below.

What backward needs must be held, or be rebuilt from values that are held. The cheapest choice of values to hold is a
minimum cut: to cut a value's edge is to hold the value, at its fewest bytes. A value that is not cut needs the inputs
of the op that rebuilds it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping

from ds_adacc.planner.policy import Policy
from ds_adacc.planner.problem import Problem
from ds_adacc.planner.profile import RETAIN, Profile
from ds_adacc.planner.simulate import forward_timeline

_UNCUT = 1 << 80  # bytes: no cut goes through such an edge if it can be avoided


def least_peak_bound(problem: Problem) -> int:
    """Bytes that the peak of any policies takes at least. A budget below them is infeasible."""
    bound = problem.max_gradient_error
    held = {each.name: least_held(each.profile, bound)[0] for each in problem.block_types}
    inside = {each.name: max(_inside(each.profile, bound), held[each.name]) for each in problem.block_types}
    if not problem.order:
        total = sum(each.count * held[each.name] for each in problem.block_types)
        return total + max(inside[name] - held[name] for name in held)
    most = before = 0
    for name in problem.order:
        most = max(most, before + inside[name])
        before += held[name]
    return most


def least_held(profile: Profile, max_gradient_error: float | None = None) -> tuple[int, dict[int, str]]:
    """The fewest bytes that one call can hold between forward and backward, and how each value held then is stored.

    A codec counts if its own error is within the bound. The errors of several together may be above it.
    """
    offers = _fewest_bytes(profile, max_gradient_error)
    nbytes, cut = _least(profile, profile.graph.saved, {value: cost for value, (cost, _) in offers.items()})
    return nbytes, {value: offers[value][1] for value in cut}


def _fewest_bytes(profile: Profile, bound: float | None) -> dict[int, tuple[int, str]]:
    """Per storable value, its fewest bytes and the store that takes them."""
    fewest = {}
    for index, value in enumerate(profile.graph.values):
        if value.storable:
            offers = profile.offers_within(index, bound)
            fewest[index] = min([(value.nbytes, RETAIN), *((offer.nbytes, offer.codec) for offer in offers)])
    return fewest


def _inside(profile: Profile, max_gradient_error: float | None) -> int:
    """Bytes that are alive in one call's forward or backward at least, at the worst moment."""
    graph, fewest = profile.graph, _fewest_bytes(profile, max_gradient_error)
    nothing = Policy((None,) * len(graph.values))
    most = max(forward_timeline(profile, nothing), default=0)
    # A copy that an earlier event has rebuilt may still be there, also of what cannot be stored.
    cost = {index: fewest[index][0] if index in fewest else value.nbytes for index, value in enumerate(graph.values)}
    later: set[int] = set()
    for time, event in reversed(list(enumerate(graph.events))):
        whole = sum(graph.values[value].nbytes for value in event.values)
        rest, _ = _least(profile, later - set(event.values), cost | dict.fromkeys(event.values, 0))
        room = sum(graph.values[value].nbytes for value in graph.let_go(time))
        most = max(most, event.gradient_bytes - min(event.late_bytes, room) + whole + rest)
        later |= set(event.values)
    return most


def _least(profile: Profile, needed: Iterable[int], cost: Mapping[int, int]) -> tuple[int, list[int]]:
    """The least total cost of values to hold so that the needed ones are held or can be rebuilt, and these values.

    Values without a cost cannot be held.
    """
    graph, rebuildable = profile.graph, profile.graph.rebuildable_ops
    source, sink, first_op = -1, -2, len(graph.values)
    origins = [first_op + value.producer if value.producer in rebuildable else sink for value in graph.values]
    network = _Network()
    for value in needed:
        network.add(source, value, _UNCUT)
    for value, origin in enumerate(origins):
        network.add(value, origin, cost.get(value, _UNCUT))
    for op in rebuildable:
        for value in graph.ops[op].inputs:
            network.add(first_op + op, value, _UNCUT)
    flow = network.maximise(source, sink)
    reached = network.reached(source)
    return flow, [value for value, origin in enumerate(origins) if value in reached and origin not in reached]


class _Network:
    """Edges with capacities, and a flow through them (Edmonds and Karp: along the shortest path that has room)."""

    def __init__(self) -> None:
        self._room: dict[int, dict[int, int]] = {}

    def add(self, begin: int, end: int, capacity: int) -> None:
        self._room.setdefault(begin, {})
        self._room[begin][end] = self._room[begin].get(end, 0) + capacity
        self._room.setdefault(end, {}).setdefault(begin, 0)

    def maximise(self, source: int, sink: int) -> int:
        """The largest flow from the source to the sink."""
        flow = 0
        while sink in (before := self._search(source, sink)):
            path, node = [], sink
            while node != source:
                path.append((before[node], node))
                node = before[node]
            pushed = min(self._room[begin][end] for begin, end in path)
            for begin, end in path:
                self._room[begin][end] -= pushed
                self._room[end][begin] += pushed
            flow += pushed
        return flow

    def reached(self, source: int) -> Collection[int]:
        """The nodes on the source's side of the minimum cut."""
        return self._search(source, None).keys()

    def _search(self, source: int, sink: int | None) -> dict[int, int]:
        """The nodes to which more can flow, each with the node before it."""
        if source not in self._room:
            return {source: source}
        before, waiting = {source: source}, deque([source])
        while waiting and sink not in before:
            node = waiting.popleft()
            for following, room in self._room[node].items():
                if room and following not in before:
                    before[following] = node
                    waiting.append(following)
        return before
