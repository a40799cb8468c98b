"""A planner without a solver: it compresses or recomputes the values that save the most bytes per second first.

It decides value by value, and assumes that what a replay reads is there and that backward needs no more than the bytes
held. The simulator then tells what its policies really take. It never offloads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from ds_adacc.planner.baselines import cover, retain_policy
from ds_adacc.planner.error_estimate import gradient_error
from ds_adacc.planner.policy import Policy
from ds_adacc.planner.problem import Problem
from ds_adacc.planner.profile import OFFLOAD, RETAIN, BlockType
from ds_adacc.planner.solution import Solution, evaluate_uniform


@dataclass(frozen=True)
class _Move:
    """Value number `value` of block type number `place` stored as `store` rather than retained, in all its blocks."""

    place: int
    value: int
    store: str | None
    saved: int
    seconds: float


def greedy(problem: Problem, budget: int) -> Solution:
    """Compress or recompute the values that save the most bytes per second first ("Band", paper, section 2.2).

    Stops as soon as the peak is within `budget` bytes. If it never is, the solution is the first that has the peak of
    the last.
    """
    moves = _ranked(problem)

    def after(count: int) -> Solution:
        places = range(len(problem.block_types))
        return evaluate_uniform(problem, [_policy(problem, place, moves[:count]) for place in places])

    limit = max(budget, after(len(moves)).peak)
    # the peak falls with almost every move, so the fewest moves that fit are found by bisection
    return after(bisect_left(range(len(moves) + 1), True, key=lambda count: after(count).peak <= limit))


def greedy_policies(block_type: BlockType) -> list[Policy]:
    """The policies that `greedy` tries for blocks of one type: from the one that retains everything to the leanest."""
    problem = Problem((block_type,))
    moves = _ranked(problem)
    return [_policy(problem, 0, moves[:count]) for count in range(len(moves) + 1)]


def _ranked(problem: Problem) -> list[_Move]:
    """One move for each value, those that save the most bytes per second first.

    Left out is what would take a block type's gradient error above its bound; the value's next move may still be made.
    """
    moves = [move for place, block_type in enumerate(problem.block_types) for move in _moves_of(place, block_type)]
    ranked = sorted(moves, key=lambda move: move.saved / (move.seconds + 1e-12), reverse=True)
    chosen: dict[tuple[int, int], _Move] = {}
    for move in ranked:
        if (move.place, move.value) not in chosen and _is_within_error(problem, [*chosen.values(), move]):
            chosen[move.place, move.value] = move
    return list(chosen.values())


def _moves_of(place: int, block_type: BlockType) -> list[_Move]:
    """What can be done with each value that backward asks for, other than retaining it."""
    graph, moves = block_type.profile.graph, []
    rebuildable, stored = graph.rebuildable_ops, retain_policy(block_type.profile).stores
    for index, value in enumerate(graph.values):
        if stored[index] is None:
            continue
        if value.producer in rebuildable:
            ops = graph.segments[value.producer].ops
            seconds = block_type.count * sum(block_type.profile.op_seconds[op] for op in ops)
            moves.append(_Move(place, index, None, block_type.count * value.nbytes, seconds))
        for offer in block_type.profile.codecs[index]:
            if offer.codec != OFFLOAD and offer.nbytes < value.nbytes:
                saved = block_type.count * (value.nbytes - offer.nbytes)
                moves.append(_Move(place, index, offer.codec, saved, block_type.count * offer.seconds))
    return [move for move in moves if move.saved]


def _is_within_error(problem: Problem, moves: Sequence[_Move]) -> bool:
    """Whether these moves keep the bound on the gradient error of the last one's block type."""
    if problem.max_gradient_error is None:
        return True
    place = moves[-1].place
    error = gradient_error(problem.block_types[place].profile, _policy(problem, place, moves))
    return error <= problem.max_gradient_error


def _policy(problem: Problem, place: int, moves: Sequence[_Move]) -> Policy:
    """The policy of one block type: everything is retained, but for those of the moves that are of it."""
    graph = problem.block_types[place].profile.graph
    wanted: list[str | None] = [RETAIN if value.storable else None for value in graph.values]
    for move in moves:
        if move.place == place:
            wanted[move.value] = move.store
    return cover(graph, wanted)
