"""How a backward comes: by the engine, by the loss itself, or only after a step of the optimizer."""

from types import SimpleNamespace

import pytest
import torch
from backward_worker import STEPS
from cases import further
from launch import told_by

from ds_adacc.engine.engine_methods import patch_optimizer, restore_optimizer

pytestmark = pytest.mark.ranks
by_stage = pytest.mark.parametrize("stage", ["1", further("2"), "3"])
CHANGED = "has been changed by a step of the optimizer since the block's forward: call backward"


results = told_by("backward_worker", values_of="stage", ranks=1)


@by_stage
def test_a_replay_with_weights_of_after_the_step_is_refused(results, stage):
    plain, replayed = results[stage]["plain"], results[stage]["replayed"]
    assert plain["said"] is None and replayed["losses"] == plain["losses"][:4]
    assert CHANGED in replayed["said"]


@pytest.mark.parametrize("stage", ["1"])
def test_a_replay_with_weights_of_after_a_step_of_another_engine_is_refused(results, stage):
    assert CHANGED in (results[stage]["shared"] or "")


@pytest.mark.parametrize("stage", ["1"])
def test_a_step_of_an_engine_that_does_not_train_the_blocks_does_not_count(results, stage):
    assert results[stage]["used"] is None


@by_stage
def test_blocks_that_replay_nothing_train_as_without(results, stage):
    plain, retained = results[stage]["plain"], results[stage]["retained"]
    assert retained == plain and len(plain["losses"]) == STEPS


@by_stage
def test_a_direct_backward_ends_a_forward_as_the_engines_does(results, stage):
    """Micro-batches of two lengths are never alive together, so the plan is for the longer one: two block types, as the
    input of the first block needs no gradient. The other adopts from it.
    """
    by_engine, direct = results[stage]["by_engine"], results[stage]["direct"]
    assert direct == by_engine
    assert by_engine["live_sets"] == [2]
    assert by_engine["is_measured"] and not by_engine["profiler_runs"]


@by_stage
def test_a_step_of_the_optimizer_itself_ends_the_step(results, stage):
    """Lightning Fabric does so."""
    plain, replayed = (results[stage][f"{name} by optimizer"] for name in ("plain", "replayed"))
    assert replayed["losses"] == plain["losses"] and len(set(plain["losses"])) == STEPS
    assert replayed["has_plan"] and not plain["has_plan"]


class Engine:
    """Counts the steps that its optimizer ends."""

    def __init__(self, optimizer, inside=None):
        self.optimizer, self.basic_optimizer, self.steps = optimizer, inside or optimizer, 0
        self.adacc = SimpleNamespace(
            is_stepping=False, compact=None, end_step=self.end_step, note_update=lambda engine: None
        )
        self.adacc.controller = SimpleNamespace(end_pending_pass=lambda: None)

    def end_step(self):
        self.steps += 1


def test_a_scheduler_may_be_made_after_the_engine():
    """Torch's wrap the optimizer's step. An optimizer may go from one engine to another."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=0.1)
    first, second = Engine(optimizer), Engine(optimizer)
    patch_optimizer(first)
    patch_optimizer(second)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    optimizer.step()
    schedule.step()
    assert (first.steps, second.steps) == (0, 1)


@pytest.mark.parametrize("is_patched", [False, True])
def test_steps_of_an_optimizer_end_none_of_an_engine_that_had_it_before(is_patched):
    """It may be inside of an optimizer of ZeRO now."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=0.1)
    first, last = Engine(optimizer), Engine(SimpleNamespace(step=lambda: optimizer.step()), inside=optimizer)
    patch_optimizer(first)
    optimizer.step()
    (patch_optimizer if is_patched else restore_optimizer)(last)
    last.optimizer.step()
    assert (first.steps, last.steps) == (1, int(is_patched))
