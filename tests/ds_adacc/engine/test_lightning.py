"""Lightning's Trainer with DeepSpeedStrategy, and a callback that attaches ds_adacc."""

import pytest
from launch import on_ranks, told

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By ZeRO stage: a plain run, one with ds_adacc, and one with ds_adacc in two parts."""
    out = tmp_path_factory.mktemp("lightning")
    on_ranks("lightning_worker.py", out, ranks=1)
    (runs,) = told(out, ranks=1)
    return runs


@pytest.mark.parametrize("stage", ["2", "3"])
def test_losses_are_bit_identical_and_blocks_recompute(runs, stage):
    plain, served, *_ = runs[stage]
    assert len(plain["losses"]) == 12
    assert served["losses"] == plain["losses"]
    assert served["replays"] > 0


@pytest.mark.parametrize("stage", ["2", "3"])
def test_a_resumed_fit_goes_on_bit_for_bit(runs, stage):
    _, served, begun, resumed = runs[stage]
    assert len(begun["losses"]) == len(resumed["losses"]) == 6
    assert begun["losses"] + resumed["losses"] == served["losses"]
    assert resumed["replays"] == served["replays"]
