"""Blocks of one type under policies of their own, by their index in forward order: exact, and held as planned."""

import pytest
import torch
import zoo
from torch import nn

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.steps.step import Step
from ds_adacc.steps.step_schedule import Purpose

pytestmark = pytest.mark.usefixtures("equal_times")


class Training:
    """Steps without DeepSpeed, with the calls that the engine's step would make; `forward` gives a step's losses."""

    def __init__(self, forward, layers=4, budget=0.75):
        section = {"memory_budget": budget, "codecs": "none", "solver": {"max_seconds": 30.0}}
        self.runtime = Runtime(load({"adacc": section}), has_engine=True)
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(zoo.GPTBlock() for _ in range(layers))
        self.forward = forward

    @property
    def block_type(self):
        (block_type,) = self.runtime.controller.plan.block_types
        return block_type

    @property
    def indices(self):
        """Each block's index in forward order."""
        order = self.runtime.agreement.forward_order
        return [order.index(self.runtime.blocks.of(block), self.block_type.name) for block in self.blocks]

    @property
    def policies(self):
        return self.runtime.controller.plan.policies[self.block_type.name]

    def record(self, block):
        (variant,) = self.runtime.blocks.of(block).variants()
        return variant

    def step(self):
        """Gradients have the bits of plain autograd's; the decision is made, or what is held is seen."""
        x = torch.randn(2, 9, zoo.WIDTH, requires_grad=True)
        plain = self.gradients(x, lambda block, x: block(x))
        ours = self.gradients(x, self.runtime.checkpoint)
        zoo.assert_same(plain, ours)
        self.runtime.controller.end_step()

    def gradients(self, x, call):
        self.blocks.zero_grad()
        x.grad = None
        torch.manual_seed(3)
        for loss in self.forward(self.blocks, x, call):
            loss.backward()
        return [x.grad, *(p.grad for p in self.blocks.parameters())]

    def run(self):
        """Until the plan stands, and has been observed: it may be made anew by a corrected model."""
        for _ in range(8):
            self.step()
        return self


def through(*order):
    """A forward that calls the blocks in this order, each on the output of the one before."""

    def forward(blocks, x, call):
        for number in order:
            x = call(blocks[number], x)
        return [zoo.loss_of(x)]

    return forward


def branches(blocks, x, call):
    """Two pairs of blocks, of which the first runs backward first."""
    return [zoo.loss_of(call(blocks[second], call(blocks[first], x.clone()))) for first, second in ((0, 1), (2, 3))]


def test_blocks_of_one_kind_run_policies_of_their_own_and_hold_what_these_say():
    training = Training(through(0, 1, 2, 3)).run()
    assert (training.block_type.blocks, training.block_type.calls_per_block) == (4, 1)
    assert len(set(training.policies)) >= 2
    (group,) = training.runtime.controller.plan.groups
    assert group.problem.order == (training.block_type.name,) * 4
    assert group.solution.peak <= training.runtime.controller.plan.budget
    each = [policy.held_bytes(training.block_type.profile) for policy in training.policies]
    held = training.runtime.controller.observation.held
    assert held.observed == held.planned == training.runtime.controller.plan.held == sum(each) > 0


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_a_blocks_place_is_that_of_its_call_not_of_its_registration(order):
    training = Training(through(*order)).run()
    places = training.indices
    assert [order[place] for place in places] == [0, 1, 2, 3]
    in_force = [training.record(training.blocks[number]).bound.policy for number in order]
    assert tuple(in_force) == training.policies
    assert len(set(in_force)) >= 2


@pytest.mark.parametrize("order", [(0, 0, 1, 1), (0, 1, 0, 1)])
def test_a_block_called_twice_has_one_policy_for_both_calls(order):
    training = Training(through(*order), layers=2, budget=0.92).run()
    assert (training.block_type.count, training.block_type.calls_per_block) == (4, 2)
    assert training.runtime.controller.plan.groups[0].problem.order == ()
    assert training.indices == [0, 1]
    first, second = training.policies
    assert first != second
    each = [2 * policy.held_bytes(training.block_type.profile) for policy in (first, second)]
    held = training.runtime.controller.observation.held
    assert held.observed == held.planned == training.runtime.controller.plan.held == sum(each) > 0


def test_blocks_called_unequally_often_share_one_policy():
    training = Training(through(0, 1, 0), layers=2).run()
    assert (training.block_type.count, training.block_type.calls_per_block) == (3, 3)
    (policy,) = training.policies
    assert [training.record(block).bound.policy for block in training.blocks] == [policy, policy]
    held = training.runtime.controller.observation.held
    assert held.observed == held.planned == 3 * policy.held_bytes(training.block_type.profile) > 0


def test_where_backward_does_not_reverse_the_forward_the_budget_holds_for_any_order():
    training = Training(branches, budget=0.8).run()
    plan = training.runtime.controller.plan
    assert len(set(training.policies)) >= 2
    assert plan.groups[0].problem.order == ()
    assert training.indices == [0, 1, 2, 3]
    for chosen in (training.policies, training.policies[::-1]):
        assert planner.peak_bytes(planner.Problem((training.block_type,)), [chosen]) <= plan.budget
    held = training.runtime.controller.observation.held
    assert held.observed == held.planned == plan.held > 0


def test_a_block_recorded_anew_keeps_its_place_and_policy():
    training = Training(through(0, 1, 2, 3)).run()
    before = [training.record(block) for block in training.blocks]
    training.runtime.controller.step = Step(Purpose.TRACK)
    training.step()
    after = [training.record(block) for block in training.blocks]
    assert [new is old for new, old in zip(after, before, strict=True)] == [False, True, True, True]
    assert tuple(variant.bound.policy for variant in after) == training.policies
    assert training.indices == [0, 1, 2, 3]
