"""A backward under vmap (`is_grads_batched=True`, `torch.func.vmap`): what is recomputed for it has no batch."""

import pytest
import torch
import torch.nn.functional as F
import zoo
from recomputing import recomputing
from torch import nn


def batched(output, x, gradients):
    return torch.autograd.grad(output, x, gradients, is_grads_batched=True)[0]


def mapped(output, x, gradients):
    return torch.func.vmap(lambda gradient: torch.autograd.grad(output, x, gradient)[0])(gradients)


class Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(result := x.tanh())
        return result

    @staticmethod
    def backward(ctx, gradient):
        (result,) = ctx.saved_tensors
        return gradient * (1 - result**2)


MIDDLES = {
    "dropout": lambda y: F.dropout(y, 0.3),
    "noise": lambda y: y * torch.rand_like(y),
    "Function": Tanh.apply,
    "reads data": lambda y: F.dropout(y, 0.3) * y.abs().max().item(),
}


class Block(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.inner, self.outer, self.middle = nn.Linear(8, 8), nn.Linear(8, 8), middle

    def forward(self, x):
        return x + self.outer(F.gelu(self.middle(self.inner(x))))


@pytest.mark.parametrize("backward", [batched, mapped])
@pytest.mark.parametrize("middle", MIDDLES)
def test_all_gradients_of_a_batch_are_exact(middle, backward):
    seen, runtime = [], recomputing()
    for is_ours in (False, True):
        torch.manual_seed(0)
        block, x = Block(MIDDLES[middle]), torch.randn(4, 8, requires_grad=True)
        output = block(x)
        if is_ours:
            torch.manual_seed(0)
            block, x = Block(MIDDLES[middle]), torch.randn(4, 8, requires_grad=True)
            output = runtime.run(runtime.blocks.of(block), block, block, (x,), {}, is_asked=True)
        seen.append([backward(output, x, torch.randn(3, 4, 8)), torch.rand(2)])
    zoo.assert_same(*seen)
    assert all(variant.bound.segments for block in runtime.blocks.all() for variant in block.variants())
