"""A model of two programs whose lengths vary apart, as those of a translator's source and target do."""

import itertools
import random

import pytest
import torch
import zoo
from any_size import Training
from held import planned_peak
from torch import nn
from two_programs import TwoPrograms, unpriced

from ds_adacc.plan import coordinator

pytestmark = pytest.mark.usefixtures("equal_times")


@pytest.fixture
def planned(monkeypatch):
    """How many live sets each plan was made for."""
    counts, solve = [], coordinator.solve

    def counted(request, *args):
        counts.append(len(request.live_sets))
        return solve(request, *args)

    monkeypatch.setattr(coordinator, "solve", counted)
    return counts


def planned_types(controller):
    return controller.agreement.type_plans.keys() - controller.agreement.origins.keys()


def test_a_step_of_many_pairs_plans_for_the_largest_and_the_others_adopt(planned):
    training = TwoPrograms(memory_budget=0.55, enabled=False)
    training.step((12, 9), (32, 20), (16, 14), (24, 18))
    plan, agreement = training.runtime.controller.plan, training.runtime.agreement
    inputs = {each.profile.graph.values[0].nbytes for each in plan.block_types}
    assert inputs == {2 * length * zoo.WIDTH * 4 for length in (32, 20)}
    assert len(agreement.known_types) == 8 and not agreement.undecided
    assert set(agreement.origins.values()) == set(plan.policies)
    for pair in ((12, 9), (16, 14), (24, 18), (12, 18), (13, 19)):
        training.step(pair)
    assert planned == [1]


def test_pairs_that_vary_need_few_plans(planned):
    """What is met later adopts from one pair, beside whatever length of the other program it comes.

    One more is made where a pair has outgrown that one.
    """
    training, lot = TwoPrograms(memory_budget=0.55, enabled=False), random.Random(2)
    for _ in range(24):
        training.step(*((lot.randrange(8, 40), lot.randrange(8, 40)) for _ in range(lot.choice((1, 2)))))
    assert planned[0] == 1 and len(planned) <= 4


def test_what_is_planned_for_in_part_needs_no_plan_of_its_own(planned):
    """Every second step runs the encoder alone, on long texts: for these, too, the pair's plan is adopted from."""
    whole = TwoPrograms(memory_budget=1.0, enabled=False)
    whole.step((20, 20))
    budget = int(0.9 * whole.runtime.controller.plan.without)
    training, lot = TwoPrograms(memory_budget=f"{budget}B", enabled=False), random.Random(3)
    planned.clear()
    for length in (20, 16, 12):
        training.step((length, length))
    for _ in range(8):
        training.step((lot.randrange(32, 37), None))
        training.step((lot.randrange(10, 25), lot.randrange(10, 25)))
    assert len(planned) == 1


def test_a_length_too_large_beside_the_planned_one_recomputes_beside_a_shorter_one(planned):
    """Whether it fits is asked again beside every other length."""
    training = TwoPrograms(memory_budget="200KiB", enabled=False)
    controller, agreement = training.runtime.controller, training.runtime.agreement
    for pair in ((24, 24), (16, 16), (20, 20), (8, 40)):
        training.step(pair)
    assert planned == [1] and not agreement.undecided
    assert unpriced(agreement) <= agreement.origins.keys() and unpriced(agreement)
    for pair in ((8, 40), (16, 40), (24, 40), (12, 40)):
        training.step(pair)
        training.step(pair)  # if the pair had to wait for a plan, it has one now
        ran = [agreement.type_plans[each.variants()[0].digest] for each in controller.blocks.all()]
        assert planned_peak(agreement, list({each.spec.name: each for each in ran}.values())) <= 200 << 10


@pytest.mark.parametrize("budget", ["250KiB", "350KiB", "450KiB"])
def test_lengths_that_are_new_together_keep_the_budget_in_their_first_pass(budget):
    """What the budget leaves beside the planned lengths is not used by each program for itself."""
    training = TwoPrograms(memory_budget=budget, enabled=False)
    controller, agreement = training.runtime.controller, training.runtime.agreement
    for pair in ((20, 20), (12, 12), (16, 16)):
        training.step(pair)
    for pair in ((30, 30), (26, 28), (22, 24), (18, 18), (14, 14)):
        training.gradients(pair, training.runtime.checkpoint)
        ran = {each.variants()[0].digest for each in controller.blocks.all()}
        assert len(ran) == 2 and ran <= agreement.origins.keys()
        assert planned_peak(agreement, [agreement.type_plans[each] for each in ran]) <= agreement.budget.limit
        training.step(pair)


def test_a_larger_pair_that_is_planned_for_is_adopted_from(planned):
    training = TwoPrograms(memory_budget=0.7, enabled=False)
    for pair in ((16, 16), (12, 12), (14, 14), (24, 24)):
        training.step(pair)
    controller = training.runtime.controller
    training.step((40, 40))
    largest = frozenset(each.variants()[0].digest for each in controller.blocks.all())
    controller.planning.decide(controller.step, [largest], "drift")
    for pair in ((20, 30), (30, 20), (12, 14)):
        training.step(pair)
        ran = {each.variants()[0].digest for each in controller.blocks.all()}
        assert {controller.agreement.origin(digest) for digest in ran - planned_types(controller)} <= largest


def test_nothing_adopts_from_a_pair_that_no_plan_fits(planned):
    training = TwoPrograms(memory_budget="200KiB", enabled=False)
    for pair in ((24, 24), (16, 16), (20, 20), (200, 200)):
        training.step(pair)
    agreement, count = training.runtime.agreement, len(planned)
    (too_large,) = agreement.unfit
    for pair in ((18, 22), (21, 17), (13, 23)):
        training.step(pair)
    assert too_large.isdisjoint(agreement.origins.values())
    assert len(planned) == count and not agreement.undecided


def test_what_the_ranks_have_planned_for_is_not_replaced_on_one_of_them():
    training = TwoPrograms(memory_budget=0.7, enabled=False)
    for pair in ((16, 16), (12, 12), (14, 14)):
        training.step(pair)
    controller = training.runtime.controller
    for pair in ((24, 24), (36, 36)):
        training.step(pair)
        controller.planning.decide(
            controller.step, [frozenset(each.variants()[0].digest for each in controller.blocks.all())], "drift"
        )
    before = planned_types(controller)
    for names in itertools.combinations(before, 2):
        controller.planning.new_sizes.adopter.adopt_for_pass(controller.agreement.alive(names))
    assert len(before) >= 4 and planned_types(controller) == before


class Joined(nn.Module):
    """Attention over an image and a text together, as in the blocks of a diffusion transformer."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(zoo.WIDTH, 3 * zoo.WIDTH), nn.Linear(zoo.WIDTH, zoo.WIDTH)

    def forward(self, x, text):
        heads = self.qkv(torch.cat((text, x), 1)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        scores = (heads[0] @ heads[1].mT).softmax(-1) @ heads[2]
        return x + self.out(scores.transpose(1, 2).flatten(2)[:, text.shape[1] :])


def test_two_inputs_that_are_joined_are_predicted_at_any_two_lengths():
    training = Training(Joined, rectifier={"enabled": False})
    sizes = ((2, 16, 7), (2, 12, 9), (3, 20, 8), (2, 13, 11))
    later = ((2, 14, 10), (3, 19, 8), (1, 12, 7), (2, 18, 18), (3, 15, 7))
    for batch, time, length in sizes:
        training.compare(time, batch, text=torch.randn(batch, length, zoo.WIDTH))
    recorded = training.runtime.recordings
    for batch, time, length in later:
        training.compare(time, batch, text=torch.randn(batch, length, zoo.WIDTH))
    assert training.runtime.recordings == recorded
    (policies,) = training.runtime.controller.plan.policies.values()
    assert any(None in policy.stores for policy in policies), "something is recomputed"
