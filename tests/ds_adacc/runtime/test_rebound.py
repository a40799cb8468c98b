"""Blocks that put other tensors in the place of buffers and attributes while they run; every gradient is exact."""

from collections import deque
from types import SimpleNamespace

import pytest
import torch
import zoo
from recorded import profile_of
from torch import nn

from ds_adacc.config import load
from ds_adacc.runtime.runtime import Runtime

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, given=None):
        return self.b((self.a(x) + self.shift(x, given)).sin().tanh())


class Average(Block):
    """A buffer is read, and then replaced by a new average."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))

    def shift(self, x, given):
        mean = self.mean
        self.mean = 0.5 * mean + 0.5 * x.detach().mean(dim=0)
        return mean


class ReplacedFirst(Average):
    """The buffer is replaced first, and then read."""

    def shift(self, x, given):
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(dim=0)
        return self.mean


class Taken(Block):
    """An attribute is set to a tensor of an argument's."""

    def shift(self, x, given):
        self.taken = given.tensor
        return self.taken


class Rotated(Block):
    """An attribute is set to a tensor that the block holds elsewhere."""

    def __init__(self):
        super().__init__()
        self.all = deque(torch.randn(WIDTH) for _ in range(3))

    def shift(self, x, given):
        self.all.rotate(1)
        self.now = self.all[0]
        return self.now


@pytest.mark.parametrize("make", [Average, ReplacedFirst, Taken, Rotated])
def test_each_call_has_the_tensors_that_it_has_read(make):
    runtime = Runtime(load({"adacc": {"memory_budget": 0.5, "codecs": "none"}}), stepped=True)
    runtime.profiler.profile = lambda recording, captured: profile_of(recording)
    seen = []
    for call in (lambda block, *args: block(*args), runtime.checkpoint):
        torch.manual_seed(0)
        block = make()
        seen.append([])
        for step in range(5):
            torch.manual_seed(step)
            x, given = torch.randn(3, WIDTH, requires_grad=True), SimpleNamespace(tensor=torch.randn(3, WIDTH))
            # never planned, it recomputes all that it may
            seen[-1].append(zoo.gradients(block, (x, given), {}, lambda *args, b=block, c=call: c(b, *args), seed=step))
            runtime.controller.end_backward()
    for expected, found in zip(*seen, strict=True):
        zoo.assert_same_bits(expected, found)
    assert all(record.bound.replays for known in runtime.blocks.all() for record in known.records())
