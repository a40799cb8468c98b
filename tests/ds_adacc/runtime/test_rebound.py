"""Blocks that put other tensors in the place of buffers and attributes while they run; every gradient is exact."""

from collections import deque
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import zoo
from recomputing import compare, recomputing
from torch import nn
from torch.nn.utils import parametrize

from ds_adacc.program.refusals import PARAMETRIZED

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


class Added(nn.Module):
    def __init__(self, delta):
        super().__init__()
        self.delta = delta

    def forward(self, weight):
        return weight + self.delta


class Parametrized(nn.Module):
    """A frozen weight is parametrized by an adapter for the time of one call, as by peft's `target_parameters`."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x):
        parametrize.register_parametrization(self.base, "weight", Added(self.down @ self.up))
        try:
            with parametrize.cached():
                return x + self.base(x.sin()).tanh()
        finally:
            parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)


def test_a_weight_that_is_parametrized_in_each_call_leaves_the_rest_recomputed():
    compare(Parametrized, 3, lambda block, step: (torch.randn(2 + step, WIDTH),))


def test_a_weight_that_is_parametrized_again_before_backward_has_changed_nothing():
    work, block, x = recomputing(), Parametrized(), torch.randn(2, WIDTH)
    twice = zoo.gradients(block, (x,), {}, lambda x: block(block(x)))
    for _ in range(2):  # recorded, and as recorded
        found = zoo.gradients(block, (x,), {}, lambda x: work.checkpoint(block, work.checkpoint(block, x)))
        zoo.assert_same_bits(twice, found)
    for variant in work.blocks.all()[0].variants():
        refusals = [(op.short_name, op.refusal) for op in variant.recording.ops]
        # Torch computes the weight once when it is parametrized, to see whether its looks stay, and once for the layer.
        weight, rest = ("add", PARAMETRIZED), ["addmm", "tanh", "add"]
        assert refusals == [("mm", None), weight, ("sin", None), weight, *((name, None) for name in rest)]


class Normalised(nn.Module):
    """Gives its weight other data in each call, which no operator and no version tells of."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.second.weight.data = F.normalize(self.second.weight.data + 0.1, dim=1)
        return x + self.second(F.gelu(self.first(x)))


class Averaged(Normalised):
    """Computes with an average of its weight, and puts the weight back."""

    def __init__(self):
        super().__init__()
        self.average = self.second.weight.data + 0.1

    def forward(self, x):
        weight, self.second.weight.data = self.second.weight.data, self.average
        between = self.second(x)
        self.second.weight.data = weight
        return x + F.gelu(self.first(between)).sin()


@pytest.mark.parametrize("kind", [Normalised, Averaged])
def test_a_weight_that_is_given_other_data_in_each_call_leaves_the_rest_recomputed(kind):
    compare(kind, 3, lambda block, step: (torch.randn(2 + step, WIDTH),))


class Own(torch.Tensor):
    """A kind of tensor that cannot be recorded."""


def test_a_tensor_of_another_kind_that_is_given_its_memory_makes_the_block_run_plain(caplog):
    def block(x):
        own = x.detach().as_subclass(Own)
        own.set_(own)
        return x.sin()

    x = torch.randn(2, WIDTH, requires_grad=True)
    recomputing().checkpoint(block, x).sum().backward()
    assert torch.equal(x.grad, x.cos())
    assert "runs without ds_adacc, under plain autograd" in caplog.text


def channels_last(block):
    block.to(memory_format=torch.channels_last)


def transposed(block):
    """As an optimizer may leave it that computes with the transposed weight."""
    for convolution in block.convolutions:
        weight = convolution.weight
        weight.data = weight.data.transpose(0, 1).contiguous().transpose(0, 1)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1))

    def forward(self, x):
        first, second = self.convolutions
        return F.conv2d(first(x).sin(), second.weight * 2, padding=1).sin()


@pytest.mark.parametrize("change", [channels_last, transposed])
def test_weights_may_get_another_layout_between_two_steps(change):
    def arguments(block, step):
        if step == 2:
            change(block)
        return (torch.randn(2, 4, 6, 6, requires_grad=True),)

    runtime = compare(Convolutions, 4, arguments)
    assert runtime.recordings == 2
