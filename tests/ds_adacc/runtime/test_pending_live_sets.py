"""Which live sets wait for a plan, beyond those that have just run."""

import pytest
import torch
import zoo
from two_programs import TwoPrograms, unpriced

from ds_adacc.execute.input_placement import InputPlacement
from ds_adacc.steps import step_controller


def test_what_an_earlier_plan_is_for_is_planned_again_where_inputs_are_held_in_another_way():
    """The last plan is for the decoder alone, and the encoder has not run since."""
    training = TwoPrograms(enabled=False)
    training.step((16, None))
    training.step((None, 16))
    controller, planned = training.runtime.controller, set(training.runtime.agreement.type_plans)
    assert len(controller.plan.policies) == 1 and len(planned) == 2
    controller.hold_inputs(InputPlacement(on_host=True))
    training.step((None, 16))
    assert controller.plan.policies.keys() == planned


def test_nothing_is_planned_before_a_resumed_run_has_recorded_a_block():
    """Its inputs are held in another way than those of the run before, and its first step needs no gradient of it."""
    before, after = TwoPrograms(enabled=False), TwoPrograms(enabled=False)
    before.step((16, None))
    after.runtime.restore(before.runtime.state())
    controller = after.runtime.controller
    restored = controller.plan
    controller.hold_inputs(InputPlacement(on_host=True))
    after.encoder.requires_grad_(False)
    after.runtime.checkpoint(after.encoder[0], torch.randn(2, 16, zoo.WIDTH))
    after.adacc.end_step()
    assert controller.plan is restored and controller.planning.pending
    after.encoder.requires_grad_(True)
    after.step((16, None))
    assert controller.plan is not restored and not controller.planning.pending


@pytest.mark.usefixtures("equal_times")
def test_sizes_that_were_forgotten_are_looked_at_together_when_they_come_again(monkeypatch):
    """The longer one fits beside the shorter one, and not beside the one that was planned for."""
    monkeypatch.setattr(step_controller, "_MOST_ADOPTED", 4)
    training = TwoPrograms(memory_budget="200KiB", enabled=False)
    agreement = training.runtime.agreement
    for pair in ((24, 24), (16, 16), (20, 20), (8, 40)):
        training.step(pair)
    (longer,) = unpriced(agreement)
    for length in range(9, 14):
        training.step((length, length))
    assert longer not in agreement.known_types
    training.step((8, 40))
    assert unpriced(agreement) == {longer} and not agreement.undecided


def test_what_waits_for_a_plan_waits_no_longer_once_its_sizes_are_forgotten():
    """A plan that other blocks call for comes first, and makes the adopted sizes be forgotten."""
    training = TwoPrograms(enabled=False)
    for length in (32, 24, 20, 28):
        training.step((length, length))
    controller = training.runtime.controller
    training.step((25, 33))
    waiting = frozenset(each.variants()[0].digest for each in controller.blocks.all())
    assert waiting <= controller.agreement.origins.keys()
    controller.planning.pending.add([waiting], "a reason")
    plan = controller.planning.decide(controller.step, controller.agreement.live_sets, "drift")
    assert waiting.isdisjoint(controller.agreement.known_types)
    training.step((32, 32))
    assert controller.plan is plan and not controller.planning.pending
