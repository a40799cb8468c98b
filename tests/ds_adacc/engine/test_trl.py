"""TRL's SFTTrainer with dynamic padding: every batch has another length. It needs the extra "trl"."""

from itertools import pairwise

import pytest
from launch import told_by

pytest.importorskip("trl", reason="TRL is not installed: pip install -e '.[trl]'")
pytestmark = pytest.mark.ranks


run = told_by("trl_worker", ranks=1)


def test_losses_are_bit_identical_at_every_step(run):
    plain, served = run
    assert [(step["length"], step["loss"]) for step in served] == [(step["length"], step["loss"]) for step in plain]
    assert len({step["length"] for step in plain}) >= 10


def test_every_step_under_a_plan_holds_what_was_planned(run):
    _, served = run
    assert all(planned == observed > 0 for planned, observed in (step["held"] for step in served[1:]))


def test_after_three_lengths_only_tracking_steps_record(run):
    _, served = run
    lengths = [step["length"] for step in served]
    assert len(set(lengths[:3])) == 3 and len(set(lengths[3:]) - set(lengths[:3])) >= 6
    for before, step in pairwise(served[2:]):
        assert step["recordings"] - before["recordings"] == (step["purpose"] == "track")
