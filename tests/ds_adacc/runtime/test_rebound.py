"""Blocks that put other tensors in the place of buffers and attributes while they run; every gradient is exact."""

from collections import deque
from types import SimpleNamespace

import pytest
import torch
from recomputing import compare, recomputing
from torch import nn

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
    def arguments(block, step):
        return torch.randn(3, WIDTH, requires_grad=True), SimpleNamespace(tensor=torch.randn(3, WIDTH))

    compare(make, 5, arguments)


class Halves(Block):
    """It multiplies by two tensors of its own."""

    def shift(self, x, given):
        return self.left * self.right.exp()


def test_parts_of_one_memory_may_lie_apart_in_a_later_call():
    def arguments(block, step):
        parts = torch.randn(2, WIDTH)
        block.left, block.right = parts if step < 2 else map(torch.clone, parts)
        return (torch.randn(3, WIDTH, requires_grad=True),)

    assert compare(Halves, 4, arguments).recordings == 1


class Moved(Block):
    """It reads a buffer and a tensor in a list, of which backward needs neither, but for recomputing."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))
        self.listed = [torch.ones(WIDTH)]

    def shift(self, x, given):
        return self.mean + self.listed[0]


@pytest.mark.parametrize("moved", [lambda block: block.mean, lambda block: block.listed[0]], ids=["buffer", "listed"])
def test_a_write_before_backward_is_an_error_also_in_the_call_that_was_recorded(moved):
    block = Moved()
    output = recomputing().checkpoint(block, torch.randn(3, WIDTH, requires_grad=True))
    moved(block).add_(1)
    with pytest.raises(RuntimeError, match=r"value buffer\..* of shape \(8,\).*modified by an in-place operation"):
        output.sum().backward()
