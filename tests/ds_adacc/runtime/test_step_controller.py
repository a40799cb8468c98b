"""What a rank of a resumed run tells of plans: the one that was restored, and the first that is new."""

from dataclasses import replace

import pytest
import torch
import zoo
from two_programs import TwoPrograms

from ds_adacc.config import load
from ds_adacc.report.journal import Journal, read
from ds_adacc.runtime.runtime import Runtime


class Run:
    """A block that is trained for a few steps. Its events are in the file `journal`."""

    def __init__(self, journal=None):
        section = {"memory_budget": "1GiB", "codecs": "none", "rectifier": {"enabled": False}}
        self.runtime = Runtime(load({"adacc": section}), has_engine=True, journal=Journal(journal))
        self.block, self.journal = zoo.Tiny(), journal

    def step(self):
        self.runtime.checkpoint(self.block, torch.randn(2, 4, requires_grad=True)).sum().backward()
        self.runtime.controller.end_backward()
        self.runtime.controller.end_step()

    @property
    def plans(self):
        return [event["reason"] for event in read(self.journal) if event["event"] == "plan"]


@pytest.fixture
def saved():
    run = Run()
    for _ in range(3):
        run.step()
    return run.runtime.state()


def test_a_restored_plan_is_told_when_a_block_has_run(saved, tmp_path):
    run = Run(tmp_path / "journal.jsonl")
    run.runtime.restore(saved)
    run.runtime.controller.end_step()  # another rank has run a block, this one has not
    assert not run.journal.exists()
    for _ in range(2):
        run.step()
    assert run.plans == [saved.plan.reason]


def test_a_plan_that_is_new_before_a_block_has_run_is_told_once(saved, tmp_path, monkeypatch):
    """As where another rank has met new shapes in the first step, and this one got no batch."""
    run = Run(tmp_path / "journal.jsonl")
    run.runtime.restore(saved)
    controller, made = run.runtime.controller, replace(saved.plan, reason="new shapes recorded")
    monkeypatch.setattr(controller.planning._coordinator, "decide", lambda *_: made)
    with monkeypatch.context() as patch:
        patch.setattr(controller._ballot, "ask", lambda *_: True)
        controller.end_step()
    assert run.plans == [made.reason]
    for _ in range(2):
        run.step()
    assert run.plans == [made.reason]


def test_blocks_that_an_earlier_plan_than_the_last_is_for_are_known_to_a_resumed_run(caplog):
    """The last plan before the checkpoint is for the decoder alone, and the encoder runs first."""
    before, after = TwoPrograms(enabled=False), TwoPrograms(enabled=False)
    for lengths in ((16, None), (None, 16), (None, 16)):
        before.step(lengths)
    state = before.runtime.state()
    after.runtime.restore(state)
    caplog.clear()
    after.step((16, None))
    assert after.runtime.controller.plan is state.plan
    assert not [each for each in caplog.messages if "is for other blocks" in each]
