"""Ranks with different data, shapes and speed: none hangs, all agree on one policy, and losses are as without."""

import math

import pytest
from launch import told_by

pytestmark = pytest.mark.ranks


ranks = told_by("uneven_worker")


def test_losses_are_bit_identical_without_codecs_and_finite_with(ranks):
    for rank in ranks:
        assert rank["none"]["losses"] == rank["plain"]["losses"]
        assert all(math.isfinite(loss) for loss in rank["paper"]["losses"])


@pytest.mark.parametrize("section", ["none", "paper"])
def test_all_agree_on_policies_also_for_shapes_that_one_alone_has_met(ranks, section):
    first, second = (rank[section] for rank in ranks)
    agreed = first["policies"].keys() & second["policies"].keys()
    assert agreed and all(first["policies"][name] == second["policies"][name] for name in agreed)
    assert not first["undecided"] and not second["undecided"]
    assert set(first["met"]) != set(second["met"]), "a new plan may have them forget what one alone has met"
    assert set(first["own"]) <= set(first["policies"]) and set(second["own"]) <= set(second["policies"])
