"""Blocks of one type with larger gradient errors of their own."""

from dataclasses import replace

import pytest
from test_error_estimate import PROFILE, policy

from ds_adacc.planner import (
    HOPELESS,
    BlockType,
    InfeasibleBudget,
    Problem,
    Strictness,
    gradient_error,
    least_peak_in_process,
    peak_bytes,
    solve_in_process,
)
from ds_adacc.planner.solution import evaluate_uniform
from ds_adacc.planner.split_by_strictness import merged, split

SHARP = Strictness((1.0, 1.0, 100.0, 1.0, 1.0), (0.0, 0.0, 1000.0))
EXACT = Strictness((HOPELESS,) * 5, (HOPELESS,) * 3)
BOUND = 0.05


def problem(*strictness, order=False):
    block_type = BlockType("block", PROFILE, len(strictness), strictness=strictness)
    return Problem((block_type,), ("block",) * len(strictness) * order, BOUND)


def test_each_kind_of_block_is_a_type_of_its_own_and_the_order_is_kept():
    whole = split(problem(None, SHARP, SHARP, None, EXACT, order=True))
    assert [(each.name, each.blocks) for each in whole.block_types] == [("block/0", 2), ("block/1", 2), ("block/2", 1)]
    assert whole.order == ("block/0", "block/1", "block/1", "block/0", "block/2")
    profiles = [each.profile for each in whole.block_types]
    assert profiles[0] == PROFILE
    assert [profile.codecs[2][0].gradient_error for profile in profiles[:2]] == [0.04, 4.0]
    assert [[offer.codec for offer in profile.codecs[2]] for profile in profiles[1:]] == [["int4", "exact"], ["exact"]]
    assert profiles[1].stale_errors == (0.0, 0.0, 1000.0)


def test_without_strictness_nothing_is_split():
    plain = Problem((BlockType("block", PROFILE, 3),), max_gradient_error=BOUND)
    assert split(plain) is plain


@pytest.mark.parametrize("order", [False, True])
def test_each_block_keeps_the_bound_by_its_own_errors(order):
    asked = problem(None, SHARP, None, EXACT, order=order)
    least = least_peak_in_process(asked, max_seconds=60)
    solved = solve_in_process(asked, least.peak + 400, max_seconds=60)
    for solution in (least, solved):
        (policies,) = solution.policies
        assert solution.peak == peak_bytes(asked, solution.policies)
        for kind, chosen in zip(asked.block_types[0].strictness, policies, strict=True):
            assert gradient_error(PROFILE if kind is None else kind.applied_to(PROFILE), chosen) <= BOUND
        assert policies[3].stores[2] != "int4" != policies[1].stores[2]
    free = replace(asked, block_types=(BlockType("block", PROFILE, 4),))
    assert solve_in_process(free, least.peak + 400, max_seconds=60).added_seconds <= solved.added_seconds
    with pytest.raises(InfeasibleBudget):
        solve_in_process(asked, 4 * 64 - 1, max_seconds=60)  # the inputs alone


def test_stricter_takes_the_larger_of_both():
    assert SHARP.stricter(EXACT) == EXACT.stricter(SHARP) == EXACT


def test_policies_come_back_in_forward_order():
    asked = problem(None, EXACT, None)
    apart = split(asked)
    chosen = {"block/0": policy(norm="int4"), "block/1": policy()}
    solution = evaluate_uniform(apart, [chosen[each.name] for each in apart.block_types])
    assert merged(asked, solution).policies == ((policy(norm="int4"), policy(), policy(norm="int4")),)
