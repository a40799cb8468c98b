"""Backward of a Function may overwrite what it has saved. What is rebuilt later must not be rebuilt from that."""

import opaque
import torch
from functions import batch, check
from opaque import array
from recorded import record
from torch import nn

from ds_adacc.execute.copied_for_backward import copied


class Consuming(torch.autograd.Function):
    """A sigmoid whose backward writes its gradient to what it has saved, as Liger-Kernel's SwiGLU does."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sigmoid()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        gradient = grad * s * (1 - s)
        array(x)[...] = array(gradient)
        return gradient


def test_what_is_rebuilt_from_a_tensor_that_a_backward_has_overwritten():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            y = self.linear(x)
            return (y * 1).tanh() + Consuming.apply(y)

    recording = check(Shared(), batch(), policies=30)
    assert all(op.replayable for op in recording.ops)


class Strided(Consuming):
    """Its kernel would need the strides of forward."""

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        assert x.stride() == (16, 2)
        s = x.sigmoid()
        x.detach()[...] = 0
        return grad * s * (1 - s)


def test_a_copy_has_the_strides_of_the_tensor():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 16)

        def forward(self, x):
            y = self.linear(x)
            return (y * 1).tanh()[:, ::2] + Strided.apply(y[:, ::2])

    assert all(op.replayable for op in check(Parts(), batch(), policies=30).ops)


def test_in_a_block_of_a_transformer_nothing_is_copied():
    recording = record(opaque.Block(), (torch.randn(2, 16, 64, requires_grad=True),), {})
    assert copied(recording, [op.index for op in recording.ops if op.replayable]) == frozenset()
