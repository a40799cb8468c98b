"""More input sizes, and more block types, than are remembered: none is forgotten while it is needed."""

import pytest
import torch
import zoo
from torch import nn
from two_programs import TwoPrograms

from ds_adacc.execute import block as blocks_of
from ds_adacc.plan import agreement as agreements
from ds_adacc.steps import pending_live_sets, step_controller
from ds_adacc.steps.step_schedule import Purpose


def settled():
    """A training that predicts all further lengths."""
    training = TwoPrograms(enabled=False)
    for length in (32, 24, 20, 28):
        training.step((length, length))
    return training


def test_a_length_in_use_outlasts_those_that_were_used_longer_ago(monkeypatch):
    monkeypatch.setattr(step_controller, "_MOST_ADOPTED", 4)
    training = settled()
    recorded = training.runtime.recordings
    for length in range(33, 43):
        training.step((25, length))
    assert training.runtime.recordings == recorded
    assert len(training.runtime.agreement.origins) <= 5


def test_no_length_is_forgotten_in_a_step_that_is_observed(monkeypatch):
    monkeypatch.setattr(step_controller, "_MOST_ADOPTED", 4)
    training = settled()
    controller = training.runtime.controller
    controller.planning.decide(controller.step, controller.agreement.live_sets, "a new plan")
    training.step((32, 32))
    controller.planning.decide(controller.step, controller.agreement.live_sets, "another one")
    controller.step = controller._next_step()
    assert controller.step.purpose is Purpose.MEASURE
    training.step(*((length, length) for length in range(12, 32)))
    assert controller.observation.held.planned == controller.observation.held.observed > 0


def test_a_type_from_which_policies_were_adopted_outlasts_its_records(monkeypatch):
    """It was predicted itself, and then planned, because its outliers had drifted."""
    monkeypatch.setattr(step_controller, "_MOST_ADOPTED", 16)
    monkeypatch.setattr(blocks_of, "_VARIANTS", 4)
    training = settled()
    training.step((33, 33))
    controller = training.runtime.controller
    last = frozenset(each.variants()[0].digest for each in controller.blocks.all())
    plan = controller.planning.decide(controller.step, [last], "drift")
    for length in range(10, 32):
        training.step((length, length))
    assert last <= set(training.runtime.agreement.origins.values())
    assert controller.plan is plan and not controller.agreement.undecided


@pytest.mark.usefixtures("equal_times")
def test_block_types_whose_policies_were_forgotten_are_planned_again(monkeypatch):
    monkeypatch.setattr(agreements, "_REMEMBERED", 3)
    training = TwoPrograms(by_size=True, max_interval=2)
    for length in (20, 21, 22, 23, 24, 25, 20, 21):
        training.step((None, length))
    agreement = training.runtime.agreement
    assert len(agreement.type_plans) == 3
    assert len(agreement.known_types) == 6
    for length in (20, 21, 22):
        training.step((16, length))
    assert len(agreement.type_plans) >= 4, "a plan for more of them at once is in force as a whole"
    known_types, type_plans = agreement.known_types, agreement.type_plans
    assert all((known.plan is None) == (name not in type_plans) for name, known in known_types.items())


def test_a_checkpoint_grows_with_no_resume(monkeypatch):
    """Blocks meet other lengths after each: the records of those before are never asked for again."""
    monkeypatch.setattr(step_controller, "_MOST_ADOPTED", 8)
    monkeypatch.setattr(blocks_of, "_VARIANTS", 6)
    state, sizes = None, []
    for generation in range(4):
        training = TwoPrograms(enabled=False)
        if state is not None:
            training.runtime.restore(state)
        for length in range(64 - 12 * generation, 52 - 12 * generation, -1):
            training.step((length, length))
        training.runtime.controller.state_is_saved()
        state = training.runtime.state()
        sizes.append((max(len(each["records"]) for each in state.blocks), len(state.profiles)))
    assert max(records for records, _ in sizes) <= 6
    assert max(profiles for _, profiles in sizes) <= 2 * 12


def test_indices_and_live_sets_of_lengths_long_gone_are_forgotten(monkeypatch):
    monkeypatch.setattr(step_controller, "_MOST_ADOPTED", 4)
    monkeypatch.setattr(pending_live_sets, "_MOST_PLANNED", 4)
    training = settled()
    for length in range(33, 45):
        training.step((25, length))
    controller = training.runtime.controller
    assert len(controller.planning.pending._planned) <= 4
    for each in controller.blocks.all():
        assert len(controller.agreement.forward_order.indices(each)) <= 4 + 3 + 1


def test_one_forward_meets_more_sizes_than_are_remembered(monkeypatch):
    """A batch of many short texts, each by itself: none of its sizes is forgotten before its backward."""
    monkeypatch.setattr(step_controller, "_MOST_ADOPTED", 3)
    training = TwoPrograms(enabled=False)
    for length in (8, 16, 12, 10, 10, 10, 10):
        training.step((length, length))
    assert training.runtime.controller.step.purpose is Purpose.RUN

    def gradients(call):
        torch.manual_seed(0)
        inputs, total = [torch.randn(2, length, zoo.WIDTH, requires_grad=True) for length in range(20, 30)], 0
        for x in inputs:
            for block in training.encoder:
                x = call(block, x)
            total = total + x.sum()
        return torch.autograd.grad(total, [*inputs, *training.encoder.parameters()])

    plain = gradients(nn.Module.__call__)
    zoo.assert_same(plain, gradients(training.runtime.checkpoint))
    training.adacc.end_step()
