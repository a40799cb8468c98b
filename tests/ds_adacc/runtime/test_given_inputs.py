"""What several calls of one forward are given, as decoder blocks the states of an encoder, counts once."""

import gc

import pytest
import torch
import torch.nn.functional as F
from storages import Storages
from torch import nn

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.runtime.given_inputs import GivenInputs
from ds_adacc.runtime.runtime import Runtime

WIDTH, LAYERS, BATCH, TIME, STATES = 64, 6, 4, 128, 512


class CrossAttention(nn.Module):
    """Reads the states in every layer."""

    def __init__(self):
        super().__init__()
        self.norm, self.q = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kv, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, states):
        k, v = self.kv(states).chunk(2, -1)
        found = F.scaled_dot_product_attention(self.q(self.norm(x))[:, None], k[:, None], v[:, None])
        return x + self.out(found[:, 0])


class Decoder:
    """The blocks' gradients exist before, so that only activations are counted."""

    def __init__(self):
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(CrossAttention() for _ in range(LAYERS))
        self.x, self.states = (torch.randn(BATCH, time, WIDTH, requires_grad=True) for time in (TIME, STATES))
        for tensor in (*self.blocks.parameters(), self.x, self.states):
            tensor.grad = torch.zeros_like(tensor)

    def step(self, call):
        hidden, states = self.x * 1.0, self.states * 1.0
        for block in self.blocks:
            hidden = call(block, hidden, states)
        loss = (hidden * 0.1).sum()
        del hidden, states
        loss.backward()
        return loss.detach()

    def peak(self, call):
        gc.collect()
        with Storages() as storages:
            self.step(call)
        return storages.peak


def runtime(**section):
    return Runtime(load({"adacc": {"rectifier": {"enabled": False}, **section}}))


@pytest.mark.parametrize("budget", [0.5, 0.7])
def test_the_states_count_once(budget):
    model, runs = Decoder(), runtime(codecs="none", memory_budget=budget)
    for _ in range(6):
        model.step(runs.checkpoint)
    plan, seen = runs.controller.plan, runs.controller.observation
    assert seen.held.planned == seen.held.observed
    of_states = BATCH * STATES * WIDTH * 4
    for measured, predicted in (
        (model.peak(runs.checkpoint), plan.peak),
        (model.peak(lambda block, *args: block(*args)), plan.without),
    ):
        assert abs(measured - predicted) < of_states / 2, "not a single copy of them too much or too little"


def test_no_bits_differ():
    model, runs = Decoder(), runtime(codecs="none", memory_budget=0.5)
    expected = model.step(lambda block, *args: block(*args)), [p.grad.clone() for p in model.blocks.parameters()]
    for _ in range(4):
        model.blocks.zero_grad()
        loss = model.step(runs.checkpoint)
        assert torch.equal(loss, expected[0])
        assert all(map(torch.equal, [p.grad for p in model.blocks.parameters()], expected[1]))


def test_nobody_compresses_what_the_others_hold():
    """A payload of its own would only add to it."""
    model, runs = Decoder(), runtime(codecs="quantization", memory_budget=0.7)
    for _ in range(3):
        model.step(runs.checkpoint)
    first, others = sorted(runs.controller.plan.block_types, key=lambda each: each.count)
    assert (first.count, others.count) == (1, LAYERS - 1)
    for block_type in (first, others):
        recording = runs.agreement.known_types[block_type.name].recording
        hidden, states = (value.index for value in recording.values if value.origin == "input")
        (policy,) = set(runs.controller.plan.policies[block_type.name])
        assert policy.stores[states] == planner.RETAIN
        assert planner.is_codec(policy.stores[hidden])
        assert recording.values[states].owned is (block_type is first)


def test_an_input_is_known_again_while_it_lives_and_nobody_has_written_to_it():
    given = GivenInputs()
    one, other, mask = torch.zeros(3, requires_grad=True) * 1, torch.zeros(3, requires_grad=True) * 1, torch.ones(3)
    assert given.held([one, mask]) == ()
    assert given.add("first", [mask, one]) == []
    assert given.held([other, mask, one]) == (2,)
    assert given.add("second", [other, mask, one]) == [("first", 1)]
    assert given.held([one[:2], one.view(3, 1), one.double()]) == ()
    one.mul_(2)
    assert given.held([one]) == ()
    address = other.data_ptr()
    del other
    again = torch.zeros(3, requires_grad=True) * 1
    assert again.data_ptr() != address or given.held([again]) == ()
