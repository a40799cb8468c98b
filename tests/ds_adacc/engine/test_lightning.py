"""Lightning's Trainer with DeepSpeedStrategy, and a callback that attaches ds_adacc."""

import pytest
from cases import cases_that_run, further
from launch import on_ranks, told

pytestmark = pytest.mark.ranks
by_stage = pytest.mark.parametrize("stage", [further("2"), "3"])


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """By ZeRO stage, without and with ds_adacc: a whole run, its first half, and the other half, resumed from that."""
    out = tmp_path_factory.mktemp("lightning")
    on_ranks("lightning_worker.py", out, *cases_that_run(request, "stage"), ranks=1)
    (runs,) = told(out, ranks=1)
    return runs


@by_stage
def test_losses_are_bit_identical_and_blocks_recompute(runs, stage):
    (plain, *_), (served, *_) = runs[stage]
    assert len(plain["losses"]) == 12
    assert served["losses"] == plain["losses"]
    assert served["replays"] > 0


@by_stage
def test_a_resumed_fit_goes_on_as_without_ds_adacc(runs, stage):
    """Lightning does not restore the state of torch's generator, so with dropout it is not the whole run's."""
    (_, plain_half, plain), (whole, half, resumed) = runs[stage]
    assert half["losses"] == plain_half["losses"]
    assert resumed["losses"] == plain["losses"] and len(resumed["losses"]) == 6
    assert resumed["replays"] == whole["replays"]
