"""Forwards without a backward, backwards of which the engine does not know, and forwards that call more blocks."""

import random

import pytest
import torch
import zoo
from any_size import Training
from held import watch_held

from ds_adacc.execute.block import Block
from ds_adacc.steps.current_pass import CalledBlocks
from ds_adacc.steps.pending_live_sets import PendingLiveSets
from ds_adacc.steps.step import Step
from ds_adacc.steps.step_schedule import Purpose


def forward(training, time=9, blocks=None, differentiable=True):
    """The loss of these blocks in a row; `differentiable`: their input is, so that all of them hold something."""
    x, rope = torch.randn(2, time, zoo.WIDTH, requires_grad=differentiable), zoo.rope(time)
    for block in training.blocks if blocks is None else blocks:
        x = training.runtime.checkpoint(block, x, rope=rope)
    return x.pow(2).sum()


def train(training, *times, **arguments):
    """A step for each of the lengths. The engine is told when backward has ended."""
    for time in times:
        forward(training, time, **arguments).backward()
        training.runtime.controller.end_backward()
        training.adacc.end_step()


@pytest.fixture
def count_plans(monkeypatch):
    """Note the number of calls in each plan of a `Training`."""

    def count(training):
        decide, training.planned = training.runtime.controller.planning.decide, []

        def noting(*args, **kwargs):
            plan = decide(*args, **kwargs)
            training.planned.append(sum(each.count for each in plan.block_types))
            return plan

        monkeypatch.setattr(training.runtime.controller.planning, "decide", noting)
        return training

    return count


def sizes_together(training):
    return sorted({len(names) for names in training.agreement.live_sets})


def evaluated(training):
    """An evaluation with gradients, at other lengths."""
    for time in (12, 15, 18):
        forward(training, time).item()


def interrupted(training):
    """A backward that fails, after which the program goes on with the next batch."""
    loss = forward(training, 12)
    loss.register_hook(_fail)
    with pytest.raises(MemoryError):
        loss.backward()


def differentiated(training):
    """A backward of which no hook tells, as that of a penalty on the gradient."""
    parameters = list(training.blocks.parameters())
    torch.autograd.grad(forward(training, 12), parameters)


def _fail(_):
    raise MemoryError


@pytest.mark.matrix
@pytest.mark.parametrize("budget", [0.4, 0.6, 1.0])  # at 0.6 the blocks retain everything of short lengths
@pytest.mark.parametrize("between", [evaluated, interrupted, differentiated])
def test_what_runs_between_two_steps_is_not_alive_with_them(between, budget, uncollected):
    training = Training(memory_budget=budget)
    train(training, 9, 12, 15, 9)
    for _ in range(6):
        between(training)
        train(training, 9)
    assert sizes_together(training) == [1]


@pytest.mark.parametrize("time", [9, 12])
def test_an_evaluation_between_two_micro_batches_of_the_first_step_is_part_of_neither(time):
    training = Training(memory_budget=0.6)
    for _ in range(2):
        forward(training, 9).backward()
        training.runtime.controller.end_backward()
        forward(training, time).item()
    training.adacc.end_step()
    (block_type,) = training.runtime.controller.plan.block_types
    assert (block_type.count, block_type.calls_per_block) == (3, 1)
    assert training.runtime.controller.plan.groups[0].problem.order == (block_type.name,) * 3


def test_a_budget_does_not_grow_by_evaluations_at_lengths_that_retain_everything():
    training = Training(memory_budget=0.6)
    train(training, 40, 40, 40)
    before = training.agreement.budget.limit
    for _ in range(3):
        for time in (30, 33, 36, 9, 12):
            forward(training, time).item()
        train(training, 40)
    assert training.agreement.budget.limit == before


def test_a_pass_whose_only_call_was_taken_back_is_over_too():
    step, block = Step(Purpose.RUN), Block("function")
    assert not step.is_pass_over
    step.note_call("a block type", block, has_policy=True)
    step.current_pass.take_back("a block type", block)
    assert not step.current_pass.called and step.is_pass_over


def test_two_forwards_before_one_backward_are_alive_together():
    training = Training(memory_budget=0.4)
    train(training, 9, 12, 15, 9)
    for _ in range(3):
        (forward(training, 9) + forward(training, 12)).backward()
        training.runtime.controller.end_backward()
        training.adacc.end_step()
    assert sizes_together(training) == [2]


def test_layers_that_are_unfrozen_later_are_planned_for(count_plans):
    training = count_plans(Training(layers=4))
    training.blocks[:2].requires_grad_(False)
    train(training, *[9] * 4, differentiable=False)
    assert set(training.planned) == {2}
    training.blocks[1].requires_grad_(True)
    train(training, *[9] * 4, differentiable=False)
    assert training.planned[-1] == 3
    training.blocks[0].requires_grad_(True)
    train(training, *[9] * 4, differentiable=False)
    assert training.planned[-1] == 4
    order = training.agreement.forward_order
    indices = [order.indices(training.runtime.blocks.of(block)).values() for block in training.blocks]
    assert [max(each) for each in indices] == [0, 0, 1, 2]  # the first is of a type of its own: its input is no result
    before = list(training.planned)
    train(training, *[9] * 6, differentiable=False)
    assert training.planned == before


TABLES = {}


class Filling(zoo.LlamaBlock):
    """Reads a table that all blocks share, and that the first call of all makes, as DeepSpeed's top-1 gate does."""

    def forward(self, x, rope):
        if "cos" not in TABLES:
            TABLES["cos"] = torch.linspace(0, 1, x.shape[-1]).cos()
        return super().forward(x * TABLES["cos"], rope)


def test_a_program_that_its_block_no_longer_runs_is_not_planned_for_beside_the_others(count_plans):
    TABLES.clear()
    training = count_plans(Training(make=Filling, layers=4, memory_budget=0.6, rectifier={"enabled": False}))
    train(training, *[9] * 8)
    assert training.planned[0] == 4 == training.planned[-1]
    assert sizes_together(training) == [1]


def test_a_block_that_is_called_more_often_than_before_keeps_the_budget(count_plans):
    """As one that a program repeats until it is content, whose number of repetitions varies."""
    training = count_plans(Training(layers=1, memory_budget="600KiB", rectifier={"enabled": False}))
    held, calls = watch_held(training.runtime.controller), (4, 4, 11, 11, 12, 12, 7, 12)
    for number in calls:
        train(training, 24, blocks=list(training.blocks) * number)
    assert training.planned == [4, 11, 12]
    assert all(observed <= 600 << 10 for _, observed in held[1::2])


@pytest.mark.parametrize(("blocks", "grows"), [(2, False), (3, False), (4, True)])
def test_growth_is_beyond_what_any_rank_has_planned_for(blocks, grows):
    """A resumed run, and a rank whose forwards call fewer blocks than those of others, have seen none of it."""
    training = Training(layers=3, memory_budget=0.5)
    train(training, 9, 9, 9)
    (name,) = training.runtime.controller.plan.policies
    pending = PendingLiveSets(training.agreement, training.runtime.controller.planning.new_sizes)
    ran = {name: CalledBlocks({Block(str(number)) for number in range(blocks)}, alive=3)}
    pending.note(ran, is_observed=False)
    assert not pending and pending.wants_observation == grows, "its order is to be seen first"
    pending.note(ran, is_observed=True)
    assert bool(pending) == grows
    pending.take()
    pending.note(ran, is_observed=True)
    assert not pending, "each number of blocks calls for one plan"


def test_layers_that_are_dropped_at_random_call_for_a_plan_as_often_as_more_of_them_run(count_plans):
    """LayerDrop: the first plan is of as many blocks as its step ran."""
    training = count_plans(Training(layers=6, memory_budget=0.5, rectifier={"enabled": False}))
    chance = random.Random(1)
    most = 0
    for kept in (3, *(chance.randint(2, 5) for _ in range(8)), 6, 4, 6, 6, 6):
        blocks = [training.blocks[i] for i in sorted(chance.sample(range(6), kept))]
        most = max(most, kept)
        train(training, 9, blocks=blocks)
    assert training.planned[0] == 3
    assert training.planned[-1] == most == 6
    assert len(training.planned) <= 6
