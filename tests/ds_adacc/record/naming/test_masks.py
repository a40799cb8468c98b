"""Masks of floats: those with two values in every call are held as bits, and none that had two values by chance."""

import pytest
import torch
import torch.nn.functional as F
import zoo
from recorded import profile_of, record, under
from torch import nn

from ds_adacc import planner
from ds_adacc.kernels import make_codec

ROWS, COLUMNS = 9, 1061  # on a CPU, code of its own computes the last elements


class Noisy(nn.Module):
    """Multiplies by noise that `make` makes. While its buffer `keep` is 1, nothing is dropped."""

    def __init__(self, make):
        super().__init__()
        self.make, self.factor = make, 1.25
        self.register_buffer("keep", torch.ones(()))
        self.register_buffer("scale", torch.ones(COLUMNS))
        self.register_buffer("table", torch.ones(2, ROWS, COLUMNS))
        self.parts = torch.ones(2, ROWS, COLUMNS).unbind()

    def draw(self, dtype=torch.float32):
        return torch.bernoulli(self.keep.to(dtype).expand(ROWS, COLUMNS))

    def forward(self, x):
        return x.sin() * self.make(self)


def train(block):
    """What the block reads has changed since it was recorded."""
    block.keep.fill_(0.6)
    block.factor = 3.0
    block.scale.uniform_()
    block.table.uniform_()
    block.parts[0].uniform_()


def as_whole_numbers(block):
    """Each element gives two: two values of which none is zero, or zeros."""
    return (block.draw() * 1.1).view(torch.int16).float()[:, :COLUMNS]


def in_part(block):
    noise = block.table[0].clone()
    noise[:, 5:].bernoulli_(0.5)
    return noise


def into_part(block):
    noise = block.table[0].clone()
    torch.bernoulli(block.keep.expand(ROWS, COLUMNS - 5), out=noise[:, 5:])
    return noise


def scaled_in_part(block):
    noise = block.draw()
    noise[:, 5:].mul_(2)
    return noise


def beside(block):
    """Two views of one storage from elsewhere are two values. A write to one counts as a write to both."""
    one, two = block.parts
    one.abs()
    two.bernoulli_(0.5)
    return one


# by name, whether the noise is a mask, and how the block makes it
NOISE = {
    "draw": (True, Noisy.draw),
    "dropout": (True, lambda block: torch.empty(ROWS, COLUMNS).bernoulli_(0.6).div_(0.6)),
    "scaled by a number that changes": (True, lambda block: block.draw() * block.factor),
    "what is dropped": (True, lambda block: 1 - block.draw()),
    "signs": (True, lambda block: block.draw() * 2 - 1),
    "cast and copied": (True, lambda block: block.draw(torch.float64).float().div(0.6).clone()),
    "drawn with a probability for each element": (
        True,
        lambda block: torch.empty_like(block.table).bernoulli_(block.table)[0],
    ),
    "drawn as bools": (True, lambda block: torch.empty(ROWS, COLUMNS, dtype=torch.bool).bernoulli_(0.6).float() / 0.6),
    "moving average": (False, lambda block: F.avg_pool1d(block.draw(), 3, 1, 1)),
    "mean": (False, lambda block: block.draw().mean(-1, keepdim=True)),
    "running sum of signs": (False, lambda block: (block.draw() - 1).cumsum(-1)),
    "running product": (False, lambda block: (block.draw() * block.factor).cumprod(0)[:1]),
    "largest neighbour": (False, lambda block: F.max_pool1d(block.draw(), 3, 1, 1)),
    "scaled by a tensor": (False, lambda block: block.draw() * block.scale),
    "scaled in place by a tensor": (False, lambda block: block.draw().mul_(block.scale)),
    "shifted by a tensor": (False, lambda block: block.draw() + block.scale),
    "sum of two": (False, lambda block: block.draw() + block.draw()),
    "chosen from tensors": (False, lambda block: torch.where(block.draw().bool(), block.scale, 0.0)),
    "written over by a tensor": (False, lambda block: block.draw().copy_(block.scale)),
    "power": (False, lambda block: (block.draw() * 0.74 + 1) ** 0.3),
    "rsqrt": (False, lambda block: (block.draw(torch.bfloat16) * 0.88 + 1).rsqrt()),
    "sum with a factor": (False, lambda block: torch.add(block.draw() * 1.68, 0.1, alpha=3)),
    "divided and rounded": (False, lambda block: torch.div(block.draw(), 0.3, rounding_mode="floor")),
    "as whole numbers": (False, as_whole_numbers),
    "drawn in part": (False, in_part),
    "drawn into a part": (False, into_part),
    "scaled in part": (False, scaled_in_part),
    "drawn beside it": (False, beside),
}


@pytest.mark.parametrize("name", NOISE)
def test_noise_is_a_mask_if_its_operators_say_so_and_is_restored_exactly_in_later_calls(name):
    is_mask, make = NOISE[name]
    block, x = Noisy(make), torch.randn(ROWS, COLUMNS, requires_grad=True)
    recording = record(block, (x,), {})
    masks = [value for value in recording.values if value.two_valued]
    assert [value.index in recording.saved for value in masks] == [True] * is_mask
    train(block)
    codecs = {value.index: make_codec("bits", backend="reference", group_size=2) for value in masks}
    retained = planner.retain_policy(profile_of(recording)).stores
    policy = planner.Policy(tuple("bits" if index in codecs else store for index, store in enumerate(retained)))
    run, _ = under(block, recording, policy, codecs)
    zoo.assert_exact(block, (x,), {}, run)


def test_noise_of_alpha_dropout_is_a_mask():
    x = torch.randn(3, 5, requires_grad=True)
    recording = record(lambda x: F.alpha_dropout(x.sin(), 0.4, training=True), (x,), {})
    assert [recording.ops[v.producer].short_name for v in recording.values if v.two_valued] == ["mul_"]
