"""The bound on the peak, against the smallest peak of any policies."""

from blocks import packable, replayable
from hypothesis import given
from hypothesis import strategies as st
from random_blocks import ERROR_BOUNDS, SMALL, examples, points, problems, profiles

from ds_adacc.planner import Problem, solve_per_block
from ds_adacc.planner.least_bytes import least_held, least_peak_bound
from ds_adacc.planner.solve_uniform import least_peak


@examples(60)
@given(profile=profiles(SMALL, ops=4), bound=st.one_of(st.none(), ERROR_BOUNDS))
def test_the_fewest_bytes_held(profile, bound):
    nbytes, stores = least_held(profile, bound)
    every = min(point.simulation.held for point in points(profile, bound))
    assert nbytes <= every if bound is not None else nbytes == every
    offered = {offer.codec: offer for value in stores for offer in profile.offers[value]}
    assert all(store == "retain" or bound is None or offered[store] for store in stores.values())


@examples(60)
@given(problem=problems(SMALL, st.one_of(st.none(), ERROR_BOUNDS)))
def test_no_policies_go_below_the_bound(problem):
    assert least_peak_bound(problem) <= least_peak(problem, 60).peak


def test_by_hand():
    # eight calls hold 2 bytes each, and the one at work needs 8 more
    packed = Problem((packable("a", 8),))
    assert (least_peak_bound(packed), least_peak(packed, 60).peak) == (7 * 2 + 8, 8 * 2 + 8)
    known = Problem((replayable(4),), order=("r",) * 4)
    # three that hold 2, then 2 + 4 bytes, and gradients of 5
    assert least_peak_bound(known) == 3 * 2 + 11
    assert solve_per_block(known, 20, max_seconds=60).peak == 20


def test_a_codec_above_the_bound_does_not_count():
    strict = Problem((packable("a", 8, error=0.2),), max_gradient_error=0.1)
    assert least_peak_bound(strict) == 64
