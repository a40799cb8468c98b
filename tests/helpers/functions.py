"""An `autograd.Function` from which tests derive others, a block that applies one, and a check of that block."""

from __future__ import annotations

import torch
import zoo
from opaque import array
from recorded import profile_of, random_policy, record, under
from torch import nn

from ds_adacc import planner
from ds_adacc.program.function_operator import FunctionOperator


class Plain(torch.autograd.Function):
    """y = 3x by address. Other Functions of the tests differ from it in one thing each."""

    takes_weight = False

    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        array(y)[...] = array(x) * 3
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * 3 + 0 * y


class Block(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weights = nn.ParameterList([torch.randn(8)] if function.takes_weight else [])

    def forward(self, x):
        y = self.function.apply(self.first(x) * 1, *self.weights)
        return self.second((y[0] if isinstance(y, tuple) else y).tanh())


def batch():
    return torch.randn(4, 8, requires_grad=True)


def check(block, x, policies=8):
    """The recording; all policies give the gradients of plain autograd."""
    expected = zoo.gradients(block, (x,), {})
    recording = record(block, (x,), {})
    chosen = [planner.recompute_policy(profile_of(recording))]
    for policy in (*chosen, *(random_policy(recording, seed) for seed in range(policies))):
        run, calls = under(block, recording, policy)
        zoo.assert_same_bits(expected, zoo.gradients(block, (x,), {}, run))
        assert not calls[0].diverged
    return recording


def function_of(recording):
    (op,) = (op for op in recording.ops if isinstance(op.func, FunctionOperator))
    return op
