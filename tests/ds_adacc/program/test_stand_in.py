"""Backward of an `autograd.Function` sees a parameter that it saved with its attributes, in every kind of step."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ds_adacc.config import load
from ds_adacc.runtime.runtime import Runtime

LOSSLESS = {"codecs": "none", "rectifier": {"enabled": False}, "solver": {"max_seconds": 30.0}}
SEEN = []  # the weights that backward was given


class FusedLinear(torch.autograd.Function):
    """As Megatron's: backward adds the weight's gradient to `main_grad` and says so on the weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        SEEN.append(weight)
        weight.main_grad.add_(gradient.flatten(0, -2).t() @ x.flatten(0, -2))
        weight.grad_added_to_main_grad = True
        return gradient @ weight, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.weight.main_grad = torch.zeros(8, 8)
        self.norm = nn.LayerNorm(8)
        self.norm.weight.main_grad = torch.zeros(8)

    def forward(self, x):
        return FusedLinear.apply(self.norm(x).sin().cos().sin().cos().sin().cos(), self.weight).exp()


def step(block, call):
    """Gradients of the input and of the norm, and what was added to `main_grad`."""
    torch.manual_seed(5)
    block.zero_grad()
    block.weight.main_grad.zero_()
    block.weight.grad_added_to_main_grad = False
    x = torch.randn(4, 8, requires_grad=True)
    call(block, x).sum().backward()
    return x.grad, block.norm.weight.grad, block.weight.main_grad.clone(), block.weight.grad_added_to_main_grad


def runtime(budget):
    return Runtime(load({"adacc": {**LOSSLESS, "memory_budget": budget}}), has_engine=True)


@pytest.mark.parametrize("budget", [0.8, 1.0])
def test_attributes_are_read_and_set(budget):
    """Recorded, observed under the plan, and then as planned: with a budget of 1.0 even without hooks."""
    torch.manual_seed(0)
    work, block = runtime(budget), Block()
    expected = step(block, lambda block, x: block(x))
    assert SEEN[-1] is block.weight
    for _ in range(4):
        for one, other in zip(step(block, work.checkpoint), expected, strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
        seen = SEEN[-1]
        assert type(seen) is nn.Parameter and seen.requires_grad and seen.is_leaf
        assert seen.data_ptr() == block.weight.data_ptr() and seen.__dict__ is block.weight.__dict__
        work.controller.end_step()
    assert work.controller.plan is not None
    assert (SEEN[-1] is block.weight) == (budget == 1.0)


@pytest.mark.parametrize("frozen", [False, True])
def test_an_attribute_may_hide_a_method(frozen):
    """Megatron's layers, and those of gpt-neox, write a number of their own to `bias.stride`."""
    torch.manual_seed(0)
    work, block = runtime(0.8), Block()
    block.norm.weight.requires_grad_(not frozen)
    for parameter in block.parameters():
        parameter.stride = 1
    expected = step(block, lambda block, x: block(x))
    for _ in range(4):
        for one, other in zip(step(block, work.checkpoint), expected, strict=True):
            assert one is other is None or torch.equal(torch.as_tensor(one), torch.as_tensor(other))
        work.controller.end_step()
    assert work.controller.plan is not None


def test_a_frozen_parameter_is_the_very_object():
    work, block = runtime(0.8), Block()
    block.weight.requires_grad_(False)
    for _ in range(3):
        step(block, work.checkpoint)
        assert SEEN[-1] is block.weight
        work.controller.end_step()


def test_a_mode_around_backward_and_gradients_of_gradients():
    block = Block()
    work = runtime(0.8)

    def gradient(call):
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        (first,) = torch.autograd.grad(call(block.norm, x).exp().sum(), x, create_graph=True)
        with FlopCounterMode(display=False):
            return torch.autograd.grad(first.square().sum(), x)[0]

    expected = gradient(lambda block, x: block(x))
    for _ in range(2):
        assert torch.equal(expected, gradient(work.checkpoint))


def test_nothing_keeps_the_parameter_alive(uncollected):
    work, block = runtime(0.8), Block()
    step(block, work.checkpoint)
    weight = weakref.ref(block.weight)
    SEEN.clear()
    del block
    assert weight() is None
