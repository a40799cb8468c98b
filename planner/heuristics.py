"""Planners that search without a MILP solver: by saved bytes per second, and by dynamic programming.

Both decide value by value, as if a replay cost its own operator alone and backward needed nothing besides what is held;
the simulator then says what their policies really take. Neither moves values to the host.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds_adacc.planner.baselines import cover, retain_policy
from ds_adacc.planner.policy import Policy
from ds_adacc.planner.problem import Problem
from ds_adacc.planner.profile import OFFLOAD, RETAIN, BlockType
from ds_adacc.planner.solution import InfeasibleBudget, Solution, check_request, evaluate_uniform

_CELLS = 512  # of the dynamic program's table, for the bytes held


@dataclass(frozen=True)
class _Move:
    """Value number `value` of block type number `place` stored as `store` rather than retained, in all its blocks."""

    place: int
    value: int
    store: str | None
    saved: int
    seconds: float
    square: float  # of its gradient error


def greedy(problem: Problem, budget: int, *, max_seconds: float) -> Solution:
    """Compress or recompute the values that save the most bytes per second first ("Band", paper, section 2.2).

    Stops as soon as the peak is within `budget` bytes. Raises InfeasibleBudget, with the last peak, if it never is;
    ValueError for a bad argument.
    """
    check_request(budget, max_seconds)
    ranked = sorted(_moves(problem), key=lambda move: move.saved / (move.seconds + 1e-12), reverse=True)
    taken = _within_error(problem, _first_of_each(ranked))
    return _fewest(problem, budget, lambda count: _policies(problem, taken[:count]), len(taken))


def dynamic_programming(problem: Problem, budget: int, *, max_seconds: float) -> Solution:
    """A knapsack of the values: the least time for each number of bytes held, then the most bytes whose peak fits.

    Raises InfeasibleBudget, with the peak of holding least, if even that exceeds `budget` bytes; ValueError for a bad
    argument.
    """
    check_request(budget, max_seconds)
    table = _Knapsack(problem)

    def plan(less: int) -> list[Policy]:
        # sizes are rounded up: all the values may take more cells than there are
        return _policies(problem, table.choices(_CELLS + 1 - less) if less else [])

    return _fewest(problem, budget, plan, _CELLS + 1)


def _fewest(problem: Problem, budget: int, plan: Callable[[int], list[Policy]], most: int) -> Solution:
    """The solution of `plan(n)` for the smallest n up to `most` that fits, if the peak falls with n."""
    started = time.perf_counter()

    def fits(count: int) -> bool:
        return evaluate_uniform(problem, plan(count), started, False).peak <= budget

    solution = evaluate_uniform(problem, plan(min(bisect_left(range(most + 1), True, key=fits), most)), started, False)
    if solution.peak > budget:
        raise InfeasibleBudget(budget, solution.peak, proven=False)
    return solution


def _moves(problem: Problem) -> list[_Move]:
    return [move for place, block_type in enumerate(problem.block_types) for move in _moves_of(place, block_type)]


def _moves_of(place: int, block_type: BlockType) -> list[_Move]:
    """What can be done with each value that backward asks for, other than retaining it."""
    graph, moves = block_type.profile.graph, []
    rebuildable, stored = graph.rebuildable_ops, retain_policy(block_type.profile).stores
    for index, value in enumerate(graph.values):
        if stored[index] is None:
            continue
        if value.producer in rebuildable:
            seconds = block_type.count * block_type.profile.op_seconds[value.producer]
            moves.append(_Move(place, index, None, block_type.count * value.nbytes, seconds, 0.0))
        for offer in block_type.profile.codecs[index]:
            if offer.codec != OFFLOAD and offer.nbytes < value.nbytes:
                saved, square = block_type.count * (value.nbytes - offer.nbytes), offer.gradient_error**2
                moves.append(_Move(place, index, offer.codec, saved, block_type.count * offer.seconds, square))
    return [move for move in moves if move.saved]


def _first_of_each(moves: Sequence[_Move]) -> list[_Move]:
    first: dict[tuple[int, int], _Move] = {}
    for move in moves:
        first.setdefault((move.place, move.value), move)
    return list(first.values())


def _within_error(problem: Problem, moves: Sequence[_Move]) -> list[_Move]:
    """The moves, without those that would take a block type's gradient error above its bound."""
    if problem.max_gradient_error is None:
        return list(moves)
    left = [problem.max_gradient_error**2] * len(problem.block_types)
    kept = []
    for move in moves:
        if move.square <= left[move.place]:
            left[move.place] -= move.square
            kept.append(move)
    return kept


def _policies(problem: Problem, moves: Sequence[_Move]) -> list[Policy]:
    wanted: list[list[str | None]] = [
        [RETAIN if value.storable else None for value in block_type.profile.graph.values]
        for block_type in problem.block_types
    ]
    for move in moves:
        wanted[move.place][move.value] = move.store
    return [
        cover(block_type.profile.graph, stores) for block_type, stores in zip(problem.block_types, wanted, strict=True)
    ]


class _Knapsack:
    """The least seconds with so many cells of bytes held, value by value; sizes are rounded up to whole cells."""

    def __init__(self, problem: Problem) -> None:
        by_value: dict[tuple[int, int], list[_Move]] = {}
        for move in _moves(problem):
            by_value.setdefault((move.place, move.value), []).append(move)
        sizes = {key: _raw(problem, key) for key in by_value}
        self._cell = math.ceil(sum(sizes.values()) / _CELLS) or 1
        best = [0.0] * (_CELLS + 1)
        self._taken: list[tuple[tuple[_Move | None, int], ...]] = []
        for key, moves in by_value.items():
            best = self._add(best, sizes[key], [m for m in moves if self._is_fine(problem, m, len(by_value))])

    def choices(self, cells: int) -> list[_Move]:
        """The moves that make for the least time with at most so many cells held."""
        moves = []
        for taken in reversed(self._taken):
            move, used = taken[cells]
            cells -= used
            if move is not None:
                moves.append(move)
        return moves

    def _add(self, best: list[float], size: int, moves: Sequence[_Move]) -> list[float]:
        options = [(None, self._cells(size), 0.0)]
        options += [(move, self._cells(size - move.saved), move.seconds) for move in moves]
        leanest = min(options, key=lambda option: option[1])
        row, taken = [], []
        for cells in range(_CELLS + 1):
            fitting = [option for option in options if option[1] <= cells]
            seconds, (move, used, _) = min(
                ((best[cells - option[1]] + option[2], option) for option in fitting),
                key=lambda pair: pair[0],
                default=(math.inf, (leanest[0], 0, 0.0)),
            )
            row.append(seconds)
            taken.append((move, used))
        self._taken.append(tuple(taken))
        return row

    def _cells(self, nbytes: int) -> int:
        return -(-nbytes // self._cell)

    def _is_fine(self, problem: Problem, move: _Move, values: int) -> bool:
        """Whether an equal share of the gradient's error allows for the move."""
        bound = problem.max_gradient_error
        return bound is None or move.square <= bound**2 / values


def _raw(problem: Problem, key: tuple[int, int]) -> int:
    place, value = key
    return problem.block_types[place].count * problem.block_types[place].profile.graph.values[value].nbytes
