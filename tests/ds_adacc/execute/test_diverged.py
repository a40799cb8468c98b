"""A call that takes another course than the recorded one: gradients stay exact, and it is said once."""

import numpy as np
import pytest
import torch
import zoo
from recorded import profile_of, record, under
from torch import nn

from ds_adacc import planner
from ds_adacc.execute.bound_policy import bind
from ds_adacc.execute.call import Call
from ds_adacc.program.slots import ParameterSlot

WIDTH = 8


class TwoLinears(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.g = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.f(x) * self.g(x)


class Branch(nn.Module):
    """What it saves second is `h` or, if the data says so, another tensor that looks the same."""

    def __init__(self, others):
        super().__init__()
        self.f, self.others = nn.Linear(WIDTH, WIDTH, bias=False), others

    def forward(self, x):
        h, k = self.f(x), x * 1.0
        first, second = (h, h) if x.sum().item() > 0 else self.others(h, k)
        return first * second


class Twice(nn.Module):
    """Saves `h` twice."""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        h = self.f(x)
        return h.sin() + h.cos()


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.g = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("c", torch.randn(4, WIDTH))

    def forward(self, x):
        return self.g(torch.sigmoid(self.f(x) + self.c.float()[: len(x)]))


def inputs(sign=1):
    torch.manual_seed(5)
    return ((sign * torch.rand(4, WIDTH)).requires_grad_(),)


def exact(block, recording, args):
    """Runs under full recomputation, exactly; returns the call."""
    run, calls = under(block, recording)
    zoo.assert_exact(block, args, {}, run)
    return calls[0]


@pytest.mark.parametrize("frozen", ["f", "g"])
def test_layer_frozen_after_recording(frozen):
    block, (x,) = TwoLinears(), inputs()
    args = (x.detach(),)
    recording = record(block, args, {})
    getattr(block, frozen).requires_grad_(False)
    assert exact(block, recording, args).diverged


@pytest.mark.parametrize("others", [lambda h, k: (h, k), lambda h, k: (k, h)])
def test_branch_that_saves_another_tensor_of_the_same_look(others):
    block = Branch(others)
    recording = record(block, inputs(), {})
    assert not exact(block, recording, inputs()).diverged
    assert exact(block, recording, inputs(-1)).diverged


def test_operator_around_a_branch_is_not_replayed():
    block = Branch(lambda h, k: (k, h))
    recording = record(block, inputs(), {})
    reasons = {op.short_name: op.refusal for op in recording.ops}
    assert reasons["mm"] == "another call may save another tensor at this position"


@pytest.mark.parametrize("freed", [False, True])
def test_memory_given_to_another_tensor(freed):
    block, (x,) = Twice(), inputs()
    x = x.detach()
    recording = record(block, (x,), {})
    call = Call(bind(recording, planner.recompute_policy(profile_of(recording)), {}), [x])
    memory = np.ones((4, WIDTH), np.float32)
    call.pack(x)
    h = torch.from_numpy(memory)
    call.pack(h)
    if freed:
        del h
        h = torch.from_numpy(memory)
    call.pack(h)
    assert call.diverged == freed


@pytest.mark.parametrize("change", [torch.Tensor.half, torch.Tensor.double, lambda c: c.t().contiguous().t()])
def test_buffer_of_another_look(change):
    block = Scaled()
    recording = record(block, inputs(), {})
    assert not exact(block, recording, inputs()).diverged
    block.c = change(block.c)
    assert exact(block, recording, inputs()).diverged


def test_parameters_are_not_retained_and_it_is_told():
    block = TwoLinears()
    recording = record(block, inputs(), {})
    bound = bind(recording, planner.recompute_policy(profile_of(recording)), {})
    told = []
    call = Call(bound, inputs(), lambda *what: told.append(what))
    call.pack(torch.randn(3, 3))
    slot = call.pack(block.g.weight.detach().t())
    assert isinstance(slot, ParameterSlot)
    assert slot.parameter is block.g.weight
    assert torch.equal(slot.unpack(), block.g.weight.t())
    assert told == [(bound, 1)]


def test_parameter_of_an_expert_that_the_recording_did_not_run():
    class Choice(TwoLinears):
        def forward(self, x):
            return self.f(x) if x.sum().item() > 0 else self.g(x)

    block = Choice()
    assert any(p is block.g.weight for p in record(block, inputs(), {}).parameters)
