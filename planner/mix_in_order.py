"""A quick mix of points where the order of the blocks is known: block by block, in forward order.

A block finds only what the blocks before it hold. So of two mixes of the first blocks, one that holds more and adds
more time is never needed: it is left out, and so are some where many are left (dynamic programming for the knapsack
problem).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ds_adacc.planner.frontier import Point
from ds_adacc.planner.problem import Problem

_MOST_MIXES = 300  # of the first blocks: one for each of so many equal parts of the range of bytes that they hold


class _Mix(NamedTuple):
    """Points for the first blocks: what they hold and add, the number of the last one's, and the mix before it."""

    held: int
    seconds: float
    number: int
    before: _Mix | None


def mix_in_order(problem: Problem, frontiers: Sequence[Sequence[Point]], budget: int) -> list[list[int]] | None:
    """The number of a point for each block, by block type; None if it finds no mix that fits into `budget` bytes.

    `problem` must have an order. `frontiers`: as of `mix_points`.
    """
    # What comes back from the host is beside other blocks, but not beside the first. With the room for it, all points
    # may be taken; without it, those that fetch nothing.
    most_fetched = max(point.simulation.fetched for points in frontiers for point in points)
    found = [_mix_beside(problem, frontiers, budget, fetched) for fetched in {0, most_fetched}]
    mix = min((mix for mix in found if mix is not None), key=lambda mix: mix.seconds, default=None)
    if mix is None:
        return None
    numbers: list[list[int]] = [[] for _ in problem.block_types]
    for place, number in zip(_places(problem), reversed([*_numbers(mix)]), strict=True):
        numbers[place].append(number)
    return numbers


def _mix_beside(problem: Problem, frontiers: Sequence[Sequence[Point]], budget: int, fetched: int) -> _Mix | None:
    """A quick mix of points that fetch so many bytes at most. That many stay free beside all blocks but the first."""
    places = _places(problem)
    mixes, cached = [_Mix(0, 0.0, 0, None)], 0
    for block, place in enumerate(places):
        runs = [(number, each.simulation) for number, each in enumerate(frontiers[place])]
        runs = [(number, run) for number, run in runs if run.fetched <= fetched]
        is_last, beside = block == len(places) - 1, fetched if block else 0
        longer: list[_Mix] = []
        for number, run in runs:
            # What caches hold of the blocks before counts as if each had the point with the most.
            forward = cached + max(run.forward, default=0)
            backward = max(run.timeline, default=0) - (run.carried if is_last else 0)
            # When backward begins, the last two blocks may both fetch.
            needs = beside + max(forward, backward, run.held + (fetched if is_last else 0))
            longer += [
                _Mix(mix.held + run.held, mix.seconds + run.seconds, number, mix)
                for mix in mixes
                if mix.held + needs <= budget
            ]
        mixes = _thinned(longer)
        cached += max((run.cached for _, run in runs), default=0)
    return mixes[-1] if mixes else None


def _thinned(mixes: list[_Mix]) -> list[_Mix]:
    """From the one that holds the least to the quickest, without those that another one beats, or that are too many."""
    best: list[_Mix] = []
    for mix in sorted(mixes, key=lambda mix: (mix.held, mix.seconds)):
        if not best or mix.seconds < best[-1].seconds:
            best.append(mix)
    if len(best) <= _MOST_MIXES:
        return best
    first, last = best[0].held, best[-1].held
    kept = {(mix.held - first) * _MOST_MIXES // (last - first): mix for mix in best[1:]}  # the quickest of each part
    return [best[0], *kept.values()]


def _numbers(mix: _Mix) -> Iterator[int]:
    """The numbers of the points, from the last block to the first."""
    while mix.before is not None:
        yield mix.number
        mix = mix.before


def _places(problem: Problem) -> list[int]:
    """The block type of each block in forward order."""
    return [place for place, blocks in problem.rows for _ in range(blocks)]
