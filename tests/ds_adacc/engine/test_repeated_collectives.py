"""Blocks that read data and call collectives, on two ranks: a second forward calls them again, on all ranks or none."""

import pytest
from launch import told_by

pytestmark = pytest.mark.ranks
LAYERS = [f"layers.{number} (Experts)" for number in range(4)]


ranks = told_by("repeated_worker")


def ours(ranks, name):
    return [rank[name]["ours"] for rank in ranks]


@pytest.mark.parametrize(
    "name",
    [
        "experts",
        "experts under ZeRO-3",
        "gathered",
        "lengths",
        "watched by a profiler",
        "collapsed",
        "read by one rank",
        "not recorded",
        "resumed",
        "not asked",
    ],
)
def test_it_computes_the_same_to_the_bit_and_counts_once(ranks, name):
    for rank in ranks:
        plain, with_ = rank[name]["plain"], rank[name]["ours"]
        assert plain["losses"] == with_["losses"]
        assert plain["buffers"] == with_["buffers"]


@pytest.mark.parametrize("name", ["experts", "experts under ZeRO-3", "gathered"])
def test_a_budget_that_no_replay_reaches_is_kept(ranks, name):
    for rank in ours(ranks, name):
        assert all(rank["whole"])
        peak, without = rank["peaks"]
        assert peak < 0.61 * without
        assert rank["recordings"] == [4] * 4


def test_a_second_forward_gathers_no_parameters(ranks):
    for rank in ours(ranks, "gathered"):
        assert rank["repeated"] == [[]] * 4
        assert not any("collectives" in remark for remark in rank["remarks"])


@pytest.mark.parametrize("name", ["experts", "experts under ZeRO-3"])
def test_all_are_recomputed_until_one_is_timed_and_then_as_few_as_the_budget_needs(ranks, name):
    one, other = (rank["repeated"] for rank in ours(ranks, name))
    assert one == other
    assert len(one[0]) == 4
    assert all(0 < len(names) < 4 for names in one[1:])


def test_what_is_recomputed_does_not_follow_the_lengths_of_one_rank(ranks):
    one, other = ours(ranks, "lengths")
    assert one["repeated"] == other["repeated"]
    assert one["repeated"][0] == LAYERS
    assert [rank["recordings"][-1] for rank in (one, other)] == [6, 6], "of further lengths, none is recorded"


def test_a_rank_that_cannot_record_a_call_runs_its_forward_again_as_the_others_do(ranks):
    one, other = ours(ranks, "watched by a profiler")
    assert one["recordings"] == [4, 4, 5, 5]
    assert other["recordings"] == [4, 4, 4, 4]
    assert one["repeated"] == other["repeated"]
    assert len(one["repeated"][-1]) == 3


def test_ranks_that_save_other_tensors_run_their_second_forwards_at_one_place(ranks):
    one, other = ours(ranks, "collapsed")
    assert one["repeated"] == other["repeated"]
    assert len(one["repeated"][-1]) > 0
    assert one["recordings"][-1] == 5 and other["recordings"][-1] == 4, "the profiler has looked on"


def test_what_one_rank_alone_reads_is_recomputed_on_none(ranks):
    one, other = ours(ranks, "read by one rank")
    assert all(one["whole"]) and not any(other["whole"])
    assert one["repeated"] == other["repeated"] == [[]] * 4


def test_a_block_that_no_rank_can_record_runs_once(ranks):
    for rank in ours(ranks, "not recorded"):
        assert rank["forwards"] == [None, 4, None]
        assert all("layers.1 (Quantizing)" not in names for names in rank["repeated"])


def test_a_resumed_run_goes_on_with_what_the_ranks_have_agreed_on(ranks):
    for rank in ours(ranks, "resumed"):
        before, *after = rank["repeated"][1:]
        assert after == [before] * 2
        assert rank["recordings"] == [4, 4, 4, 4], "the blocks are recorded anew, once"


def test_who_has_not_asked_is_told_how_to(ranks):
    for rank in ours(ranks, "not asked"):
        assert rank["repeated"] == [[]] * 4
        assert any("To have the block recomputed as a whole, call it by" in remark for remark in rank["remarks"])
