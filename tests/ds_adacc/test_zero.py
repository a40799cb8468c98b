"""Two ranks under every ZeRO stage: the losses with a lossless policy are those without ds_adacc, bit for bit."""

import json

import pytest
from launch import on_ranks

pytestmark = pytest.mark.ranks
CASES = [f"{precision} {stage}" for precision in ("fp32", "bf16") for stage in (0, 1, 2, 3)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("zero")
    on_ranks("zero_worker.py", out)
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("case", CASES)
def test_losses_are_bit_identical(ranks, case):
    for rank in ranks:
        assert len(rank[case]["plain"]["losses"]) == 10
        assert rank[case]["adacc"]["losses"] == rank[case]["plain"]["losses"]


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_run_the_same_policies_and_hold_what_they_say(ranks, case):
    first, second = (rank[case]["adacc"]["plan"] for rank in ranks)
    assert first["policies"] == second["policies"]
    assert len(first["policies"]) == 3
    assert any(policy["replays"] for policy in first["policies"])
    assert first["counts"] == second["counts"] == [3]
    assert first["observed"] == second["observed"] == first["planned"]


@pytest.mark.parametrize("case", ["fp32 3", "bf16 3"])
def test_no_gathered_parameter_outlives_its_block(ranks, case):
    for rank in ranks:
        assert rank[case]["adacc"]["gathered_bytes"] > 0
        assert rank[case]["adacc"]["alive_after_forward"] == 0
        assert rank[case]["adacc"]["alive_after_backward"] == 0
