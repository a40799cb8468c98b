"""Greedy by hand, and no planner beats the MILP."""

from dataclasses import replace

import pytest
from blocks import check_gradient_errors
from hypothesis import given
from hypothesis import strategies as st
from random_blocks import ERROR_BOUNDS, SMALL, examples, microseconds, problems

from ds_adacc.planner import (
    BlockGraph,
    BlockType,
    CodecCost,
    Event,
    Op,
    Policy,
    Problem,
    Profile,
    Value,
    compress_policy,
    everywhere,
    greedy,
    greedy_policies,
    recompute_policy,
    retain_policy,
    solve_uniform,
)
from ds_adacc.planner.solve_uniform import least_peak


def stores_of(solution):
    """Of the one policy of all blocks of the only block type."""
    (policies,) = solution.policies
    assert policies == policies[:1] * len(policies)
    return policies[0].stores


@pytest.fixture
def pair():
    """Four calls with two values: q saves 150 bytes a second in INT4; p 75 in INT4, 100 in INT8."""
    values = (Value("p", "", 100, None, True), Value("q", "", 40, None, True))
    graph = BlockGraph(values, (), (Event("q", (1,), 0), Event("p", (0,), 0)))
    p = (CodecCost("int4", 25, 0.5, 0.5, 0.1, 0, 0.5), CodecCost("int8", 50, 0.25, 0.25, 0.01, 0, 0.3))
    q = (CodecCost("int4", 10, 0.1, 0.1, 0.1, 0, 0.4),)
    return Problem((BlockType("pair", Profile(graph, (), (p, q)), 4),))


# what four calls hold, and the backward of one besides
GREEDY = [
    (("retain", "retain"), 4 * 140, 0.0),
    (("retain", "int4"), 4 * 110 + 40, 4 * 0.2),
    (("int8", "int4"), 4 * 60 + 90, 4 * 0.7),
]


def test_the_policies_that_greedy_tries_are_known_for_one_block_type(pair):
    (block_type,) = pair.block_types
    assert [policy.stores for policy in greedy_policies(block_type)] == [stores for stores, _, _ in GREEDY]


def test_where_the_bound_excludes_a_values_best_move_greedy_makes_its_next_one():
    """b may not be lossy, so it is recomputed, although its codec saves more bytes a second."""
    values = (Value("a", "", 100, None, True), Value("b", "", 100, 0, True))
    graph = BlockGraph(values, (Op("op", (0,), (1,), True, 0),), (Event("op", (0, 1), 0),))
    lossy = (CodecCost("int4", 25, 1e-6, 1e-6, 0.1, 0, gradient_error=0.5),)
    problem = Problem((BlockType("block", Profile(graph, (1e-3,), ((), lossy)), 2),))
    assert stores_of(greedy(problem, 350)) == ("retain", "int4")
    assert stores_of(greedy(replace(problem, max_gradient_error=0.1), 350)) == ("retain", None)


def test_greedy_saves_the_most_bytes_a_second_first_and_stops_when_it_fits(pair):
    too_little = [2**50, *(peak for _, peak, _ in GREEDY)]
    for (stores, peak, seconds), next_peak in zip(GREEDY, too_little, strict=False):
        for budget in (peak, next_peak - 1):
            solution = greedy(pair, budget)
            assert (stores_of(solution), solution.peak) == (stores, peak)
            assert solution.added_seconds == pytest.approx(seconds)
            assert not solution.proven_optimal
    assert greedy(pair, 329) == greedy(pair, 0) == greedy(pair, 330)


def test_greedy_recomputes(block):
    """In `block` of conftest a saves 40 bytes a second, c 30 (6 in INT4), b 10; d cannot be kept."""
    problem = Problem((BlockType("block", block, 2),))
    expected = [
        (470, ("retain", "retain", "retain", "retain", None, None)),
        (390, ("retain", None, "retain", "retain", None, None)),
        (355, ("retain", None, "retain", None, None, None)),
        (345, ("retain", None, None, None, None, None)),
    ]
    for peak, stores in expected:
        solution = greedy(problem, peak)
        assert (solution.peak, solution.policies) == (peak, ((Policy(stores),) * 2,))
    assert greedy(problem, 344) == greedy(problem, 345)


def test_greedy_keeps_the_gradient_error_within_its_bound(pair):
    budget = 480
    for bound, stores in [(0.6, ("retain", "int4")), (0.45, ("retain", "int4")), (0.35, ("int8", "retain"))]:
        assert stores_of(greedy(replace(pair, max_gradient_error=bound), budget)) == stores
    assert greedy(replace(pair, max_gradient_error=0.45), budget - 1).peak == 480  # q's leave no room for p's
    assert greedy(replace(pair, max_gradient_error=0.0), 0).peak == 4 * 140


def test_greedy_moves_no_values_to_the_host(block):
    x, a, c = (CodecCost.offload(nbytes, 0.0, 0.0) for nbytes in (100, 40, 60))
    profile = replace(block, codecs=((x,), (a,), (), (*block.codecs[3], c), (), ()))
    problem = Problem((BlockType("block", profile, 2),))
    assert greedy(problem, 345).policies == everywhere(recompute_policy, problem).policies


@examples(60)
@given(problem=problems(SMALL, bounds=st.one_of(st.none(), ERROR_BOUNDS)))
def test_no_planner_beats_the_milp(problem):
    smallest = least_peak(problem, 60).peak
    rules = [retain_policy, recompute_policy]
    rules += [compress_policy] if problem.max_gradient_error is None else []
    simple = [everywhere(rule, problem) for rule in rules]
    for budget in {smallest, (smallest + simple[0].peak) // 2, simple[0].peak}:
        best = solve_uniform(problem, budget, max_seconds=60)
        fitting = [found for found in (*simple, greedy(problem, budget)) if found.peak <= budget]
        assert fitting or budget < simple[0].peak
        for found in fitting:
            assert microseconds(best.added_seconds) <= microseconds(found.added_seconds)
            check_gradient_errors(problem, found)
