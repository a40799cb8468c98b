"""Ratios of steps that took turns, and how sure they are."""

import random
import time

import pytest
import torch
from timing import Ratio, Seconds, in_turns, seconds


def test_each_step_is_compared_with_the_base_of_its_own_round():
    assert Ratio.of([1.5, 3.0, 6.0], [1.0, 2.0, 4.0]) == Ratio(median=1.5, low=1.5, high=1.5)


@pytest.mark.parametrize(("pairs", "outside"), [(1, 0), (5, 0), (6, 0), (8, 0), (9, 1), (20, 5), (30, 9)])
def test_the_range_is_the_95_percent_confidence_interval_of_the_median(pairs, outside):
    """The numbers left out on each side are those of the sign test's table at 5 %, two-sided."""
    ratios = [float(each) for each in range(pairs)]
    random.Random(0).shuffle(ratios)
    assert Ratio.of(ratios, [1.0] * pairs) == Ratio((pairs - 1) / 2, outside, pairs - 1 - outside)


def test_the_range_holds_the_true_median_in_19_of_20_cases():
    draw = random.Random(0)
    ratios = [Ratio.of([draw.lognormvariate(0, 0.2) for _ in range(30)], [1.0] * 30) for _ in range(2000)]
    assert 0.945 <= sum(ratio.low <= 1 <= ratio.high for ratio in ratios) / 2000 <= 0.97


@pytest.mark.parametrize(
    ("ratio", "shown"),
    [
        (Ratio(1.33, 1.31, 1.35), "1.33 (1.31-1.35)"),
        (Ratio(1.08, 1.06, 1.10), "1.08 (1.06-1.10)"),
        (Ratio(1.02, 1.00, 1.04), "≈ 1.02 (1.00-1.04)"),  # no sign that it is not 1
        (Ratio(0.98, 0.96, 1.00), "≈ 0.98 (0.96-1.00)"),
        (Ratio(5.38, 1.20, 6.00), "≈ 5.38 (1.20-6.00)"),
        (Ratio(1.33, 1.28, 1.40), "≈ 1.33 (1.28-1.40)"),  # far from 1, but not known to 0.03
        (Ratio(1.0, 1.0, 1.0), "1.00 (1.00-1.00)"),
    ],
)
def test_a_ratio_whose_range_exceeds_what_it_shows_is_marked(ratio, shown):
    assert str(ratio) == shown


def test_waiting_is_no_computing():
    found = seconds(lambda: time.sleep(0.1), torch.device("cpu"))
    assert found.wall >= 0.1 > 2 * found.computing


def test_each_step_runs_once_in_a_round_and_the_orders_differ():
    ran = []

    def step(name):
        def run():
            ran.append(name)
            return Seconds(len(ran), 0)

        return run

    taken = in_turns({name: step(name) for name in "abc"}, rounds=20)
    rounds = [tuple(ran[start : start + 3]) for start in range(0, 60, 3)]
    assert {frozenset(each) for each in rounds} == {frozenset("abc")}
    assert len(set(rounds)) > 1
    assert [each.wall for each in taken["b"]] == [place + 1 for place, name in enumerate(ran) if name == "b"]
