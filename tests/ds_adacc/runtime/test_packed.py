"""Packed batches: several texts in a row, told apart by where each begins and by the length of the longest.

The longest is a number among the arguments, as flash-attn and transformers take it, and another one in each batch.
"""

import random
from itertools import pairwise

import pytest
import torch
import zoo
from opaque import array
from torch import nn

from ds_adacc.config import load
from ds_adacc.engine.adacc import Adacc
from ds_adacc.runtime.runtime import Runtime

LAYERS = 3


class VarlenAttention(torch.autograd.Function):
    """Attends within each text. Its kernel reads by address where texts begin, and has room for the longest."""

    @staticmethod
    def forward(ctx, q, k, v, edges, longest):
        out = torch.empty_like(q)
        for start, stop in pairwise(array(edges)):
            assert stop - start <= longest, "the kernel would write beyond its memory"
            scores = array(q)[start:stop] @ array(k)[start:stop].T
            array(out)[start:stop] = scores / longest @ array(v)[start:stop]
        ctx.save_for_backward(q, k, v, edges)
        ctx.longest = longest
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, edges = ctx.saved_tensors
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for start, stop in pairwise(array(edges)):
            part = slice(start, stop)
            with torch.enable_grad():
                leaves = [each[part].detach().requires_grad_() for each in (q, k, v)]
                out = leaves[0] @ leaves[1].T / ctx.longest @ leaves[2]
                for to, made in zip(grads, torch.autograd.grad(out, leaves, grad[part]), strict=True):
                    to[part] = made
        return *grads, None, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(zoo.WIDTH), nn.Linear(zoo.WIDTH, 3 * zoo.WIDTH)
        self.fc1, self.fc2 = nn.Linear(zoo.WIDTH, 4 * zoo.WIDTH), nn.Linear(4 * zoo.WIDTH, zoo.WIDTH)

    def forward(self, x, edges, longest, step=0):
        q, k, v = (part.contiguous() for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + VarlenAttention.apply(q, k, v, edges, longest)
        return x + self.fc2(self.fc1(x).tanh() if step < 9 else self.fc1(x).sigmoid())


def packed(lot):
    """Where each text begins, and the length of the longest."""
    lengths = [lot.randint(3, 40) for _ in range(lot.randint(2, 6))]
    edges = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    return edges, max(lengths)


class Scaled(Block):
    """Computes with the number as well."""

    def forward(self, x, edges, longest):
        return super().forward(x, edges, longest) * longest


def train(steps, arguments, make=Block):
    """Compares each step with plain autograd. Returns how many calls of a block have been recorded after each."""
    torch.manual_seed(0)
    blocks, lot, recordings = nn.ModuleList(make() for _ in range(LAYERS)), random.Random(0), []
    config = load({"adacc": {"memory_budget": 0.6, "codecs": "none", "rectifier": {"enabled": False}}})
    runtime = Runtime(config, stepped=True)
    adacc = Adacc(config, runtime)
    for step in range(steps):
        edges, longest = packed(lot)
        x = torch.randn(int(edges[-1]), zoo.WIDTH, requires_grad=True)

        args = edges, longest, *arguments(step)

        def run(call, args=args, x=x):
            def through(x):
                for block in blocks:
                    x = call(block, x, *args)
                return x

            return zoo.gradients(blocks, (x,), {}, through)

        zoo.assert_same_bits(run(lambda block, *args: block(*args)), run(runtime.checkpoint))
        adacc.end_step()
        recordings.append(runtime.recordings)
    return recordings


def test_the_longest_text_is_a_size_of_the_program():
    recordings = train(30, lambda step: ())
    assert recordings[-1] == recordings[9] < 30, "further batches are predicted"


@pytest.mark.parametrize("first", [0, 5])
def test_a_number_that_no_operator_is_given_may_choose_the_branch(first):
    recordings = train(12, lambda step: (step + first,))
    assert all(before < after for before, after in pairwise(recordings)), "a block is recorded at each step"


def test_a_number_that_is_computed_with_is_recorded_anew():
    recordings = train(8, lambda step: (), Scaled)
    assert all(before < after for before, after in pairwise(recordings))
