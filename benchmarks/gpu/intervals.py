"""Sets of intervals of time: what several have in common, and what they leave out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

Interval = tuple[float, float]  # start and end


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """What at least one of the intervals covers: intervals that neither overlap nor touch, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def overlap(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """What both cover. Each is a union."""
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def gaps(intervals: Sequence[Interval]) -> list[Interval]:
    """What a union leaves out between its first start and its last end."""
    return [(before[1], after[0]) for before, after in pairwise(intervals)]


def length(intervals: Iterable[Interval]) -> float:
    """The sum of their lengths; of a union, the time that it covers."""
    return sum(end - start for start, end in intervals)
