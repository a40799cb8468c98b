"""Trains two stacks of blocks, of different programs, on batches of any two lengths."""

import torch
import zoo
from torch import nn

from ds_adacc.config import load
from ds_adacc.engine.adacc import Adacc
from ds_adacc.runtime.runtime import Runtime


class FeedForward(nn.Module):
    """With `by_size`, it computes with its input's size, so each size is a program of its own."""

    def __init__(self, by_size=False):
        super().__init__()
        self.up, self.down = nn.Linear(zoo.WIDTH, 2 * zoo.WIDTH), nn.Linear(2 * zoo.WIDTH, zoo.WIDTH)
        self.by_size = by_size

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(x))) / (int(x.shape[1]) if self.by_size else 1)


class TwoPrograms:
    """GPT blocks, and blocks of another kind: encoder and decoder, say. Compared with plain autograd, bit for bit."""

    def __init__(self, by_size=False, memory_budget=0.7, **rectifier):
        torch.manual_seed(0)
        self.encoder = nn.ModuleList(zoo.GPTBlock() for _ in range(2))
        self.decoder = nn.ModuleList(FeedForward(by_size) for _ in range(2))
        section = {"memory_budget": memory_budget, "codecs": "none", "rectifier": rectifier}
        self.runtime = Runtime(load({"adacc": section}), has_engine=True)
        self.adacc = Adacc(self.runtime)

    def step(self, *lengths):
        """One optimizer step: a micro-batch for each pair of lengths, the encoder's (None: it does not run) and the
        decoder's.
        """
        for given in lengths:
            plain, found = (self.gradients(given, call) for call in (nn.Module.__call__, self.runtime.checkpoint))
            zoo.assert_same_bits(plain, found)
            self.runtime.controller.end_backward()
        self.adacc.end_step()

    def gradients(self, lengths, call):
        torch.manual_seed(0)
        stacks = [s for s, length in zip((self.encoder, self.decoder), lengths, strict=True) if length]
        inputs = [torch.randn(2, length, zoo.WIDTH, requires_grad=True) for length in lengths if length]

        def through(*inputs):
            total = 0
            for blocks, x in zip(stacks, inputs, strict=True):
                for block in blocks:
                    x = call(block, x)
                total = total + x.sum()
            return total

        return zoo.gradients(nn.ModuleList(stacks), inputs, {}, through)


def unpriced(agreement):
    """The block types that have adopted policies which may not fit beside the largest sizes of other programs."""
    return {name for name, agreed in agreement.adopted_types.items() if not agreed.is_priced}
