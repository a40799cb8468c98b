"""Policies for all blocks, mixed from the points of their frontiers by a rule, where the integer program finds no mix.

In a known order, `mix_in_order` finds the mix. Without an order, or if it finds none, one price of a byte held comes
first: each block takes the point that is cheapest at that price (Everett, "Generalized Lagrange multiplier method",
1963). Either way room may be left. There, blocks one by one take quicker points.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from math import inf

from ds_adacc.planner.frontier import Point
from ds_adacc.planner.mix_in_order import mix_in_order
from ds_adacc.planner.peak import Simulations, peak_bytes
from ds_adacc.planner.policy import Policy
from ds_adacc.planner.problem import Problem
from ds_adacc.planner.solution import Solution, evaluate_per_block

_MOST_TRIES = 1000  # mixes: a number of tries, not of seconds, so that the same problem has the same answer


def mix_points(problem: Problem, frontiers: Sequence[Sequence[Point]], budget: int) -> Solution | None:
    """The quickest mix that the rule finds within `budget` bytes; None if it finds none.

    `frontiers`: the points of each block type, from the fastest to the one that holds the least.
    """
    return _Mixing(problem, frontiers, budget).solution()


class _Mixing:
    """The search. A mix is the number of a point for each block, by block type."""

    def __init__(self, problem: Problem, frontiers: Sequence[Sequence[Point]], budget: int) -> None:
        self._problem, self._frontiers, self._budget = problem, frontiers, budget
        pairs = zip(problem.block_types, frontiers, strict=True)
        self._known: Simulations = {
            (block_type.name, point.policy): point.simulation for block_type, points in pairs for point in points
        }

    def solution(self) -> Solution | None:
        mix = mix_in_order(self._problem, self._frontiers, self._budget) if self._problem.order else None
        mix = self._cheapest() if mix is None else mix
        if mix is None:
            return None
        tries = iter(range(_MOST_TRIES))
        while self._is_quickened(mix, tries):
            pass
        return evaluate_per_block(self._problem, self._policies(mix), self._known)

    def _cheapest(self) -> list[list[int]] | None:
        """What is cheapest at the lowest price at which it fits; None if it fits at none."""
        prices = [*sorted(set(self._prices())), inf]
        lowest = bisect_left(prices, True, key=lambda price: self._fits(self._at(price)))
        return None if lowest == len(prices) else self._at(prices[lowest])

    def _prices(self) -> Iterator[float]:
        """The prices, in seconds a byte, at which a block takes another point."""
        for points in self._frontiers:
            for quick, lean in itertools.combinations(points, 2):
                if quick.simulation.held > lean.simulation.held:
                    yield _saved(lean, quick) / (quick.simulation.held - lean.simulation.held)

    def _at(self, price: float) -> list[list[int]]:
        """What is cheapest at this price. At an infinite one, that is what holds the least."""
        mix = []
        for block_type, points in zip(self._problem.block_types, self._frontiers, strict=True):
            costs = [point.simulation.seconds + price * point.simulation.held for point in points]
            cheapest = len(points) - 1 if price == inf else min(range(len(points)), key=costs.__getitem__)
            mix.append([cheapest] * block_type.blocks)
        return mix

    def _is_quickened(self, mix: list[list[int]], tries: Iterator[int]) -> bool:
        """Have blocks take quicker points, those first that save the most time for a byte. Whether any has."""
        was_quickened = False
        for place, block, number in self._moves(mix):
            before = mix[place][block]
            points = self._frontiers[place]
            if _saved(points[before], points[number]) <= 0:  # an earlier move has given it a quicker one
                continue
            if next(tries, None) is None:
                return False
            mix[place][block] = number
            if self._fits(mix):
                was_quickened = True
            else:
                mix[place][block] = before
        return was_quickened

    def _moves(self, mix: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
        """(block type, block, point) of each quicker point that a block could take, the best first."""
        found = []
        for place, points in enumerate(self._frontiers):
            for block, now in enumerate(mix[place]):
                for number, point in enumerate(points):
                    saved = _saved(points[now], point)
                    if saved > 0:
                        held = max(point.simulation.held - points[now].simulation.held, 1)
                        found.append((-saved / held, place, block, number))
        return [(place, block, number) for _, place, block, number in sorted(found)]

    def _fits(self, mix: Sequence[Sequence[int]]) -> bool:
        return peak_bytes(self._problem, self._policies(mix), self._known) <= self._budget

    def _policies(self, mix: Sequence[Sequence[int]]) -> list[list[Policy]]:
        return [
            [points[number].policy for number in numbers] for points, numbers in zip(self._frontiers, mix, strict=True)
        ]


def _saved(slow: Point, quick: Point) -> float:
    return slow.simulation.seconds - quick.simulation.seconds
