"""Functions that are made anew at each forward: what is in their cells tells which program they run."""

import functools
import types

import pytest
import torch
import torch.nn.functional as F
import zoo
from recomputing import recomputing
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(zoo.WIDTH, zoo.WIDTH), nn.Linear(zoo.WIDTH, zoo.WIDTH)

    def gelu(self, x):
        return self.down(F.gelu(self.up(x)))

    def silu(self, x):
        return self.down(F.silu(self.up(x)))


class Activation:
    def __init__(self, factor):
        self.factor = factor

    def gelu(self, x):
        return F.gelu(x) * self.factor

    def silu(self, x):
        return F.silu(x) * self.factor


def gelu(x):
    return F.gelu(2 * x) * x


def silu(x):
    return F.silu(2 * x) * x


def affine(x, layer, gain=0.0, bias=0.0):
    return layer.down(F.gelu(layer.up(x) * (1 + gain) + bias))


def applied(function):
    return lambda x: function(x)


def between(layer, function):
    return lambda x: layer.down(function(layer.up(x)))


def between_default(layer, function):
    def run(x, function=function):
        return layer.down(function(layer.up(x)))

    return run


def between_item(layer, function):
    functions = {"act": function}
    return lambda x: layer.down(functions["act"](layer.up(x)))


def scaled(layer, scale, shift):
    def run(x):
        x = layer.up(x) if scale is None else layer.up(x) * scale
        return layer.down(F.gelu(x if shift is None else x + shift))

    return run


def scaled_twice(layer, scale, shift, again):
    return lambda x: layer.down(F.gelu(layer.up(x) * scale + shift) * again)


def through(*layers):
    return lambda x: functools.reduce(lambda x, layer: F.gelu(layer(x)), layers, x)


def around(first, second):
    def run(x):
        x = x if first is None else F.gelu(first(x)) * x
        return x if second is None else F.silu(second(x)) * x

    return run


def method(layer, factor):
    return types.MethodType(lambda self, x: self.down(F.gelu(self.up(x) * factor)), layer)


ACTIVATION = Activation(2.0)
SCALE, SHIFT = torch.linspace(1, 2, zoo.WIDTH), torch.linspace(0, 1, zoo.WIDTH)
PAIRS = {
    "a method of a module": lambda m: (applied(m.gelu), applied(m.silu)),
    "a method of an object": lambda m: (between(m, ACTIVATION.gelu), between(m, ACTIVATION.silu)),
    "a function": lambda m: (between(m, gelu), between(m, silu)),
    "a function among the defaults": lambda m: (between_default(m, gelu), between_default(m, silu)),
    "a function in a dict": lambda m: (between_item(m, gelu), between_item(m, silu)),
    "a partial": lambda m: (between(m, functools.partial(gelu)), between(m, functools.partial(silu))),
    "an argument's name": lambda m: tuple(functools.partial(affine, layer=m, **{n: 2.0}) for n in ("gain", "bias")),
    "the place of a tensor": lambda m: (scaled(m, SCALE, None), scaled(m, None, SHIFT)),
    "the place of a module": lambda m: (around(m.up, None), around(None, m.up)),
    "a tensor that comes twice": lambda m: tuple(scaled_twice(m, SCALE, SHIFT, t) for t in (SCALE, SHIFT)),
    "a module that comes twice": lambda m: (through(m.up, m.down, m.up), through(m.up, m.down, m.down)),
    "what is in the cell of a method": lambda m: (method(m, 1.0), method(m, 3.0)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_two_functions_that_differ_in_one_thing_alone_are_told_apart(name):
    work, layer = recomputing(), Layer()
    for step in range(6):
        function = PAIRS[name](layer)[step % 2]
        x = torch.randn(2, 9, zoo.WIDTH, requires_grad=True)
        plain = zoo.gradients(layer, (x,), {}, function)
        zoo.assert_same_bits(plain, zoo.gradients(layer, (x,), {}, functools.partial(work.checkpoint, function)))
    assert work.recordings == 2


@pytest.mark.parametrize(
    "make", (lambda: lambda x: F.gelu(x), lambda: functools.partial(F.gelu)), ids=["plain", "partial"]
)
def test_an_attribute_of_a_function_may_change(make):
    """Another function reads it. The block stays the same one."""
    work, layer, act = recomputing(), Layer(), make()
    for step in range(6):
        act.factor = 1.0 if step < 3 else 3.0

        def run(x):
            return layer.down(act(layer.up(x)) * act.factor)

        x = torch.randn(2, 9, zoo.WIDTH, requires_grad=True)
        plain = zoo.gradients(layer, (x,), {}, run)
        zoo.assert_same_bits(plain, zoo.gradients(layer, (x,), {}, functools.partial(work.checkpoint, run)))
    assert work.recordings == 2 and len(work.blocks.all()) == 1
