"""The frontier of one block, against every policy of small ones."""

import itertools
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_blocks import ERROR_BOUNDS, MICROSECOND, examples, microseconds, points, profiles, undominated

from ds_adacc.planner import (
    BlockGraph,
    CodecCost,
    Event,
    NoSolutionInTime,
    Point,
    Policy,
    Profile,
    Value,
    frontier,
    recompute_policy,
    retain_policy,
)
from ds_adacc.planner.milp import optimise

frontier_module = sys.modules["ds_adacc.planner.frontier"]  # its function hides it in the package
TINY = st.integers(0, 5)  # so that a 64th of the range is less than a byte


def corners(undominated):
    """The points below every line between two others, one on each side."""
    return {
        (held, seconds)
        for held, seconds in undominated
        if not any(
            (held - below) * (at_above - at_below) <= (seconds - at_below) * (above - below)
            for below, at_below in undominated
            for above, at_above in undominated
            if below < held < above
        )
    }


def check(profile, max_gradient_error=None, blocks=1, with_cached=False):
    options = {"blocks": blocks, "max_gradient_error": max_gradient_error, "with_cached": with_cached}
    found = frontier(profile, max_seconds=60, **options)

    def pair(point):
        run = point.simulation
        return run.held + run.cached * with_cached, microseconds(run.seconds)

    pairs = [pair(point) for point in found]
    every = {pair(point) for point in points(profile, max_gradient_error)}
    best = undominated(every)
    assert (best if blocks <= 4 else corners(best)) <= set(pairs) <= every
    step = math.ceil((pairs[0][0] - pairs[-1][0]) / 16)
    for (above, _), (below, _) in itertools.pairwise(pairs):
        assert not [held for held, _ in best if below < held <= above - step]
    # from the fastest to the leanest, no point beaten in both
    assert [held for held, _ in pairs] == sorted({held for held, _ in pairs}, reverse=True)
    assert [seconds for _, seconds in pairs] == sorted(seconds for _, seconds in pairs)
    assert pairs[0][1] == min(seconds for _, seconds in every)
    assert pairs[-1][0] == min(held for held, _ in every)
    assert all(point == Point.of(profile, point.policy) for point in found)
    return found


@examples(50)
@given(profile=profiles(TINY))
def test_frontier_equals_brute_force(profile):
    check(profile)
    check(profile, with_cached=True)


@examples(50)
@given(profile=profiles(TINY))
def test_corners_for_many_blocks_are_those_of_brute_force(profile):
    check(profile, blocks=5)


@examples(50)
@given(profile=profiles(TINY), bound=ERROR_BOUNDS)
def test_frontier_equals_brute_force_under_a_bound_on_the_gradient_error(profile, bound):
    assert all(point.gradient_error <= bound for point in check(profile, bound))


def test_by_hand(block):
    kept, recomputed = retain_policy(block), recompute_policy(block)
    found = frontier(block, max_seconds=60)
    assert [(point.simulation.held, point.simulation.seconds) for point in found] == [
        (210, 0.5),  # d is always replayed
        (160, 1.5),  # a and b are replayed at once: neither is worth keeping alone
        (150, 2.5),  # c is replayed
        (100, 3.5),
    ]
    assert (found[0].policy, found[-1].policy) == (kept, recomputed)


def test_among_equally_quick_the_smaller_error_wins_then_fewer_bytes():
    coarse, fine, wide = (
        CodecCost(name, nbytes, MICROSECOND, 0.0, error, 0)
        for name, nbytes, error in (("coarse", 2, 0.2), ("fine", 3, 0.1), ("wide", 4, 0.1))
    )
    value = Value("x", "", 8, None, True)
    profile = Profile(BlockGraph((value,), (), (Event("x", (0,), 0),)), (), ((coarse, wide, fine),))
    found = [point.policy.stores for point in frontier(profile, max_seconds=60)]
    assert found == [("retain",), ("fine",), ("coarse",)]


def independent(count):
    """So many values, of 1, 2, 4, ... bytes, each of which may be left out for a microsecond a byte."""
    values = tuple(Value(f"v{i}", "", 2**i, None, True) for i in range(count))
    gone = tuple((CodecCost("gone", 0, 2**i * MICROSECOND, 0.0, 0.0, 0),) for i in range(count))
    return Profile(BlockGraph(values, (), (Event("all", tuple(range(count)), 0),)), (), gone)


@pytest.mark.parametrize(
    ("values", "held"),
    [
        (6, list(range(63, -1, -1))),
        (7, [*range(127, 0, -2), 0]),  # in steps of a 64th of the range, to the least in any case
        (10, [*range(1023, 0, -16), 0]),
    ],
)
def test_more_than_64_points_are_thinned(values, held):
    found = frontier(independent(values), max_seconds=60)
    assert [point.simulation.held for point in found] == held
    assert [microseconds(point.simulation.seconds) for point in found] == [2**values - 1 - left for left in held]


@pytest.mark.parametrize(
    ("values", "held"),
    [
        (4, list(range(15, -1, -1))),
        (6, [*range(63, 0, -4), 0]),
        (10, [*range(1023, 0, -64), 0]),
    ],
)
def test_for_many_blocks_points_on_a_line_are_a_16th_apart(values, held):
    found = frontier(independent(values), max_seconds=60, blocks=5)
    assert [point.simulation.held for point in found] == held
    assert [microseconds(point.simulation.seconds) for point in found] == [2**values - 1 - left for left in held]


def test_no_corners_are_looked_for_within_a_64th():
    """Each of 300 values costs a little more time than the one before, so every number of bytes is a corner."""
    values = tuple(Value(f"v{i}", "", 1, None, True) for i in range(300))
    gone = tuple((CodecCost("gone", 0, (i + 1) * MICROSECOND, 0.0, 0.0, 0),) for i in range(300))
    profile = Profile(BlockGraph(values, (), (Event("all", tuple(range(300)), 0),)), (), gone)
    found = frontier(profile, max_seconds=60, blocks=5)
    held = [point.simulation.held for point in found]
    assert (held[0], held[-1]) == (300, 0)
    assert 64 <= len(held) <= 128
    assert max(above - below for above, below in itertools.pairwise(held)) <= 300 // 64 + 1
    added = [microseconds(point.simulation.seconds) for point in found]
    assert added == [(300 - left) * (301 - left) // 2 for left in held]


def test_sizes_that_are_not_whole_granules():
    """A codec's 2 MiB and 1 byte are rounded up; the points hold what the simulator says."""
    mib = 2**20
    values = (Value("a", "", 16 * mib, None, True), Value("b", "", 16 * mib, None, True))
    packed = (CodecCost("packed", 2 * mib + 1, MICROSECOND, 0.0, 0.1, 0),)
    profile = Profile(BlockGraph(values, (), (Event("ab", (0, 1), 0),)), (), (packed, packed))
    found = frontier(profile, max_seconds=60)
    assert [point.simulation.held for point in found] == [32 * mib, 18 * mib + 1, 4 * mib + 2]


def test_nothing_to_choose():
    profile = Profile(BlockGraph((), (), (Event("e", (), 8),)), (), ())
    assert frontier(profile, max_seconds=60) == (Point.of(profile, Policy(())),)


def test_out_of_time(gpt):
    with pytest.raises(NoSolutionInTime, match="the solver found no point of the frontier in 1e-09 seconds"):
        frontier(gpt.profile, max_seconds=1e-9)


def late(model):
    raise NoSolutionInTime("late")


def wrong(model):
    """CBC finds no solution, though there is one."""
    model.solver._SolverCbc__clear_sol()


@pytest.mark.parametrize("end", [late, wrong])
@pytest.mark.parametrize("blocks", [1, 5])
def test_the_points_found_in_time_come_back(gpt, monkeypatch, blocks, end):
    every = frontier(gpt.profile, max_seconds=60, blocks=blocks)
    searches = iter([optimise] * 4)

    def impatient(model, watched, max_seconds):
        """Runs out of time at the fifth search."""
        search = next(searches, None)
        return end(model) if search is None else search(model, watched, max_seconds)

    monkeypatch.setattr(frontier_module, "optimise", impatient)
    # the first search is for the least that can be held; then come the fastest, the leanest, and one between them
    fastest, between, leanest = frontier(gpt.profile, max_seconds=60, blocks=blocks)
    assert (fastest, leanest) == (every[0], every[-1])
    assert between in every[1:-1]
