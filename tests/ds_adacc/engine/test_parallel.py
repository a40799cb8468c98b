"""Two tensor-parallel ranks: collectives are never replayed, and a held block input is shared out among the ranks."""

import pytest
from launch import told_by
from parallel_worker import LAYERS, ROWS, STEPS, WIDTH

pytestmark = pytest.mark.ranks


ranks = told_by("parallel_worker")


@pytest.mark.parametrize("style", ["megatron", "functional", "all_to_all", "zeros"])
def test_a_collective_inside_a_block_is_never_replayed(ranks, style):
    for rank in ranks:
        seen = rank["collectives"][style]
        assert seen["same"]
        assert seen["recorded"] >= 1
        assert "gelu" in seen["replayed"] and "native_layer_norm" in seen["replayed"]
        assert len(seen["without"]) == (2 if style == "all_to_all" else 1)
        assert seen["with"] == seen["without"]


CASES = ["whole", "partitioned", "retained", "odd", "on host"]


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_without(ranks, case):
    for rank in ranks:
        assert rank[case]["same"] == [True] * STEPS


@pytest.mark.parametrize("case", CASES)
def test_held_bytes_are_those_planned(ranks, case):
    for rank in ranks:
        planned, observed = rank[case]["held"]
        assert planned == observed


def test_each_input_is_gathered_once_in_backward(ranks):
    for rank in ranks:
        for case in ("whole", "on host"):
            assert rank[case]["gathers"] == [0] * STEPS
        for case in ("partitioned", "retained"):
            assert rank[case]["gathers"] == [0] + [LAYERS] * (STEPS - 1)  # from the first plan on
            assert [store for store, _ in rank[case]["inputs"]] == ["partition"] * LAYERS
        assert [store for store, _ in rank["on host"]["inputs"]] == ["retain"] * LAYERS  # there already, on a CPU


def test_half_of_each_input_is_held(ranks):
    """With a budget for everything the plan differs in nothing else."""
    rank = ranks[0]
    whole = rank["retained"]["inputs"][0][1]
    assert whole == 6 * ROWS * WIDTH * 4
    assert rank["odd"]["inputs"][0][1] == ROWS * WIDTH * 4


@pytest.mark.parametrize("case", ["overflown", "overflown on one"])
def test_inputs_are_shared_once_all_ranks_have_measured_the_codecs(ranks, case):
    """In the first step the gradient overflows. A measurement in the second needs whole inputs, and no collective."""
    for rank in ranks:
        assert rank[case] == [[False, 0], [False, 0], [True, LAYERS], [True, LAYERS]]


def test_a_rank_that_knows_no_errors_shares_inputs_as_agreed(ranks):
    for rank in ranks:
        assert rank["forgotten"] == [[False, 0], [True, LAYERS], [True, LAYERS], [True, LAYERS]]


def test_inputs_are_not_shared_where_each_rank_adopts_policies_of_its_own(ranks):
    whole, adopted, planned = [False, 0, False], [False, 0, True], [True, LAYERS, False]
    for rank in ranks:
        assert rank["new lengths"] == [whole, adopted, adopted, adopted, planned]


def test_the_ranks_of_a_group_run_one_policy(ranks):
    first, second = ranks
    for case in ("partitioned", "retained", "odd"):
        assert first[case]["policies"] == second[case]["policies"]
        assert len(first[case]["policies"]) == LAYERS
    assert any(first["partitioned"]["replays"])


def test_an_engine_over_tensor_parallel_ranks(ranks):
    first, second = (rank["engine"]["adacc"] for rank in ranks)
    for rank in ranks:
        seen = rank["engine"]
        assert len(seen["plain"]["losses"]) == 4 * STEPS
        assert seen["adacc"]["losses"] == seen["plain"]["losses"]
        assert seen["adacc"]["inputs"] == [["partition"] * LAYERS, ["retain"] * LAYERS]  # turned off half-way
        assert seen["adacc"]["held"][0] == seen["adacc"]["held"][1]
    assert first["ranks"] == second["ranks"] == 2
    assert first["policies"] == second["policies"] and any(first["replays"])
