"""Every other layer has a window: it runs another program than the others, but the same one at short lengths."""

from __future__ import annotations

import itertools

import pytest
import torch
import zoo
from any_size import Training
from torch import nn
from torch.nn import functional as F

TOKENS = 600  # of a batch: at most so many


class Layer(nn.Module):
    """Attention and an MLP. With a `window`, a mask is made for longer texts."""

    def __init__(self, window):
        super().__init__()
        self.window = window
        self.norm, self.qkv = nn.LayerNorm(zoo.WIDTH), nn.Linear(zoo.WIDTH, 3 * zoo.WIDTH)
        self.out, self.up = nn.Linear(zoo.WIDTH, zoo.WIDTH), nn.Linear(zoo.WIDTH, 4 * zoo.WIDTH)
        self.down = nn.Linear(4 * zoo.WIDTH, zoo.WIDTH)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        mask = None
        if self.window is not None and x.shape[1] > self.window:
            places = torch.arange(x.shape[1])
            before = places[:, None] - places
            mask = (before >= 0) & (before < self.window)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Run(Training):
    """Half of four layers have a window."""

    def __init__(self, *times):
        numbers = itertools.count()
        super().__init__(lambda: Layer(32 if next(numbers) % 2 else None), layers=4, memory_budget=0.5)
        self.run(*times)

    def run(self, *times):
        for time in times:
            self.compare(time, batch=TOKENS // time)


@pytest.mark.usefixtures("equal_times")
def test_after_a_short_length_the_programs_of_long_ones_are_predicted_as_before():
    training = Run(34, 43, 41, 112, 63, 98, 29)
    recordings, blocks = training.runtime.recordings, training.runtime.blocks.all()
    mispredicted = [set(block.mispredicted) for block in blocks]
    training.run(168, 194, 60)
    assert training.runtime.recordings == recordings
    assert [block.mispredicted for block in blocks] == mispredicted


@pytest.mark.usefixtures("equal_times")
def test_a_fraction_is_of_calls_that_were_alive_at_once():
    """Short texts have four calls of one program. Long ones have two, and two of another, which are never more."""
    training = Run(34, 43, 41, 112, 63, 98, 29, 168, 194, 60, 130, 29, 33)
    assert training.agreement.budget.limit <= 1.05 * Run(194).agreement.budget.limit
