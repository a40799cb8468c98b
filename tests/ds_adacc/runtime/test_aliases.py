"""Tensors that are one while a block is recorded, and two in later calls: a later call is recorded anew, or exact."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from recomputing import compare
from torch import nn

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("one", torch.randn(3, WIDTH))
        self.register_buffer("other", torch.randn(3, WIDTH))

    def forward(self, x, first):
        return self.b((self.a(x) + self.sum(x, first)).sin())


class FirstInput(Block):
    """As layers that are one module get the first layer's input, in an object."""

    def change(self, x, step):
        return SimpleNamespace(tensor=x if step < 2 else torch.randn(3, WIDTH, requires_grad=True))

    def sum(self, x, first):
        return x * 2 + first.tensor


@dataclass
class Pair:
    one: torch.Tensor
    other: torch.Tensor


class TwoFields(Block):
    def change(self, x, step):
        given = torch.randn(3, WIDTH)
        return Pair(given, given if step < 2 else torch.randn(3, WIDTH))

    def sum(self, x, first):
        return first.one * 2 + first.other


class TwoBuffers(Block):
    def change(self, x, step):
        self.other = self.one if step < 2 else torch.randn(3, WIDTH)

    def sum(self, x, first):
        return self.one * 2 + self.other


class BufferGiven(Block):
    def change(self, x, step):
        return self.one if step < 2 else torch.randn(3, WIDTH)

    def sum(self, x, first):
        return self.one * 2 + first


class HeldInput(Block):
    """The block holds its input as an attribute, in the first calls."""

    def change(self, x, step):
        self.held = x.detach() if step < 2 else torch.randn(3, WIDTH)

    def sum(self, x, first):
        return x * 2 + self.held


class ParameterGiven(Block):
    """One of the block's own, in the first calls."""

    def change(self, x, step):
        return self.a.bias if step < 2 else nn.Parameter(torch.randn(WIDTH))

    def sum(self, x, first):
        return x * first


class ParameterExpanded(ParameterGiven):
    def change(self, x, step):
        return super().change(x, step).expand(3, WIDTH)


@pytest.mark.parametrize(
    "make",
    [FirstInput, TwoFields, TwoBuffers, BufferGiven, HeldInput, ParameterGiven, ParameterExpanded],
)
def test_no_tensor_is_taken_for_another(make):
    def arguments(block, step):
        x = torch.randn(3, WIDTH, requires_grad=True)
        return x, block.change(x, step)

    assert compare(make, 4, arguments).recordings == 2
