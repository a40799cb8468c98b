"""Lightning's Trainer with DeepSpeedStrategy, and a callback that attaches ds_adacc."""

import pytest
from cases import further
from launch import told_by

pytestmark = pytest.mark.ranks
by_stage = pytest.mark.parametrize("stage", [further("2"), "3"])


runs = told_by("lightning_worker", values_of="stage", ranks=1)


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
