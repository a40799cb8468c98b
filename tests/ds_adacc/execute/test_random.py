"""Draws that backward repeats: the same bits each time, and nobody else's random numbers change."""

import threading

import pytest
import torch
import torch.nn.functional as F
import zoo
from recorded import profile_of, record, under
from replayed import replayed
from torch import nn

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.execute.bound_policy import bind
from ds_adacc.execute.call import Call
from ds_adacc.program.slots import unpack
from ds_adacc.runtime.runtime import Runtime


@pytest.fixture
def case():
    """A block with dropout that holds nothing of its masks, with its arguments and its calls."""
    block, args, kwargs = zoo.example("inplace")
    run, calls = under(block, record(block, args, kwargs))
    return block, args, run, calls


def test_the_masks_are_rebuilt(case):
    block, args, run, calls = case
    zoo.assert_exact(block, args, {}, run)
    recording = calls[0].bound.recording
    masks = [value.index for value in recording.values if value.role == "dropout_mask" and not value.overwritten]
    assert masks and all(calls[0].bound.policy.stores[index] is None for index in masks)


def test_what_is_drawn_between_forward_and_backward_or_by_backward_itself_stays_as_it_is(case):
    block, args, run, _ = case

    def step(call):
        torch.manual_seed(3)
        x = args[0].detach().requires_grad_()
        drawn = []
        x.register_hook(lambda gradient: drawn.append(torch.rand(3)) or gradient)
        output = call(x)
        drawn.append(torch.rand(5))
        output.register_hook(lambda gradient: drawn.append(torch.rand(3)) or gradient)
        gradients = torch.autograd.grad(zoo.loss_of(output), [x, *block.parameters()])
        return [*gradients, *drawn, torch.rand(2)]

    for expected, found in zip(step(block), step(run), strict=True):
        assert torch.equal(expected, found)


def test_a_draw_is_repeated_as_often_as_backward_runs(case):
    block, args, run, _ = case
    parameters = list(block.parameters())

    def several(call):
        torch.manual_seed(3)
        loss = zoo.loss_of(call(*args))
        partial = torch.autograd.grad(loss, parameters[:2], retain_graph=True)
        torch.rand(7)
        first = torch.autograd.grad(loss, parameters, retain_graph=True)
        torch.manual_seed(8)
        return [*partial, *first, *torch.autograd.grad(loss, parameters), torch.rand(1)]

    for expected, found in zip(several(block), several(run), strict=True):
        assert torch.equal(expected, found)


class Interrupted(nn.Module):
    """Dropout, before which something else may use its generator."""

    def __init__(self):
        super().__init__()
        self.fc, self.between = nn.Linear(zoo.WIDTH, zoo.WIDTH), [lambda: None]

    def forward(self, x):
        h = self.fc(x)
        self.between[0]()
        return F.dropout(h, 0.3).sin()


@pytest.mark.parametrize("what", ["another thread draws", "the block is seeded"])
def test_a_draw_from_a_state_that_was_not_noted_raises(what):
    """It was recorded without this. Its mask is gone by now: an error is all that is left."""

    def draw():
        thread = threading.Thread(target=torch.rand, args=(1,))
        thread.start()
        thread.join()

    block, x = Interrupted(), torch.randn(2, 9, zoo.WIDTH, requires_grad=True)
    run, _ = under(block, record(block, (x,), {}))
    block.between[0] = draw if what == "another thread draws" else lambda: torch.manual_seed(1)
    before = torch.get_rng_state()
    output = run(x)
    after = torch.get_rng_state()
    assert not torch.equal(before, after)
    with pytest.raises(RuntimeError, match="was not in the state that it had when autograd saved the tensor before"):
        output.sum().backward()
    assert torch.equal(after, torch.get_rng_state())


def test_a_block_that_is_seeded_inside_is_recorded_as_not_replayable():
    block, x = Interrupted(), torch.randn(2, 9, zoo.WIDTH, requires_grad=True)
    block.between[0] = lambda: torch.manual_seed(1)
    recording = record(block, (x,), {})
    assert not recording.draws
    plain = zoo.gradients(block, (x,), {})
    run, _ = under(block, recording)
    zoo.assert_same_bits(plain, zoo.gradients(block, (x,), {}, run))


def test_a_call_that_takes_another_turn_keeps_what_it_cannot_draw_again():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.turn = nn.Linear(zoo.WIDTH, zoo.WIDTH), nn.Linear(zoo.WIDTH, zoo.WIDTH), [False]

        def forward(self, x):
            h = F.dropout(self.one(x), 0.3).sin()
            if self.turn[0]:
                h = h[:, 1:].exp()
            return F.dropout(self.two(h), 0.3).sin()

    block, x = Branching(), torch.randn(2, 9, zoo.WIDTH, requires_grad=True)
    run, calls = under(block, record(block, (x,), {}))
    block.turn[0] = True
    zoo.assert_exact(block, (x,), {}, run)
    assert calls[0].diverged


@pytest.mark.usefixtures("equal_times")
def test_policies_on_trial_are_measured_with_the_masks_of_their_call():
    """A lossy policy that rebuilds masks: its error is that of its codecs, not of other masks."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(zoo.GPTBlock(64, 4, dropout=0.5) for _ in range(2))
    section = {"codecs": "paper", "memory_budget": 0.4, "solver": {"max_seconds": 10.0}}
    runtime = Runtime(load({"adacc": section}))
    for _ in range(6):
        x = torch.randn(4, 64, 64, requires_grad=True)
        for block in blocks:
            x = runtime.checkpoint(block, x)
        x.square().sum().backward()
    errors = runtime.agreement.errors_in_force()
    assert any(replayed(runtime.controller.plan))
    assert errors
    assert all(0 < error < 0.1 for error in errors.values())


def test_the_states_are_what_a_draw_costs():
    """Two states of the CPU's generator, and no more: the planner counts them as the observer does."""
    block, args, kwargs = zoo.example("gpt")
    recording = record(block, args, kwargs)
    profile = profile_of(recording)
    states = [value for value in recording.values if value.origin == "generator"]
    assert [value.nbytes for value in states] == [torch.get_rng_state().nbytes] * 2
    policy = planner.recompute_policy(profile)
    call = Call(bind(recording, policy, {}), args)
    with torch.autograd.graph.saved_tensors_hooks(call.pack, unpack):
        block(*args, **kwargs)
    held = sum(tensor.nbytes for holder in call.holders.values() for tensor in holder.held())
    assert held == args[0].nbytes + 2 * torch.get_rng_state().nbytes
    assert planner.simulate(profile, policy).held == held
