"""Sets of intervals, beside counting unit steps one by one."""

import random
from itertools import pairwise

import pytest
from intervals import gaps, length, overlap, union


def points(intervals):
    return {point for start, end in intervals for point in range(start, end)}


@pytest.mark.parametrize("seed", range(50))
def test_they_cover_what_counting_says(seed):
    lot = random.Random(seed)
    first, second = ([(at := lot.randrange(40), at + lot.randrange(1, 8)) for _ in range(6)] for _ in range(2))
    a, b = union(first), union(second)
    assert points(a) == points(first) and length(a) == len(points(first))
    assert points(overlap(a, b)) == points(first) & points(second)
    assert all(before[1] < after[0] for before, after in pairwise(a))
    assert points(gaps(a)) == set(range(a[0][0], a[-1][1])) - points(first)
