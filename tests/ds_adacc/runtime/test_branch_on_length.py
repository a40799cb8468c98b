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


@pytest.mark.usefixtures("equal_times")
def test_after_a_short_length_the_programs_of_long_ones_are_predicted_as_before():
    numbers = itertools.count()
    training = Training(lambda: Layer(32 if next(numbers) % 2 else None), layers=4, memory_budget=0.5)

    def run(*times):
        for time in times:
            training.compare(time, batch=TOKENS // time)

    run(34, 43, 41, 112, 63, 98, 29)
    recordings, blocks = training.runtime.recordings, training.runtime.blocks.all()
    mispredicted = [set(block.mispredicted) for block in blocks]
    run(168, 194, 60)
    assert training.runtime.recordings == recordings
    assert [block.mispredicted for block in blocks] == mispredicted
