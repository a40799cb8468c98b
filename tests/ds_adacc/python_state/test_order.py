"""A block may compute with what it holds one after the other: the order is part of its state."""

import itertools
from collections import OrderedDict

import pytest
import torch
import zoo
from changing import recordings
from torch import nn


class Block(nn.Module):
    """Computes with what `held` returns, in that order: functions, tensors or numbers."""

    def __init__(self, held):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(zoo.WIDTH, zoo.WIDTH), nn.Linear(zoo.WIDTH, 8)
        self.modules_by_name = nn.ModuleDict({"a": nn.Tanh(), "b": nn.Sigmoid()})
        self.parameters_by_name = nn.ParameterDict({name: torch.randn(zoo.WIDTH) for name in "ab"})
        self.functions = {"a": torch.tanh, "b": torch.sigmoid}
        self.numbers = {"a": 1.5, "b": 0.5}
        self.set = {8, 0}
        self.ordered = OrderedDict(a=1.5, b=0.5)
        self.register_buffer("a", torch.randn(zoo.WIDTH))
        self.register_buffer("b", torch.randn(zoo.WIDTH))
        self.held = held

    def forward(self, x, given=None, **more):
        h = self.fc1(x)
        for each in (*self.held(self), *(given or {}).values(), *more.values()):
            h = each(h) if callable(each) else torch.tanh(h + each) * each
        return self.fc2(torch.sin(h))


def to_the_end(held):
    held["a"] = held.pop("a")


def other_set(block):
    block.set = {0, 8} if list(block.set) == list({8, 0}) else {8, 0}
    assert list({0, 8}) != list({8, 0})


CHANGES = {
    "modules": (lambda b: b.modules_by_name.values(), lambda b: to_the_end(b.modules_by_name)),
    "parameters": (lambda b: b.parameters_by_name.values(), lambda b: to_the_end(b.parameters_by_name)),
    "buffers": (lambda b: b._buffers.values(), lambda b: to_the_end(b._buffers)),
    "functions": (lambda b: b.functions.values(), lambda b: to_the_end(b.functions)),
    "numbers": (lambda b: b.numbers.values(), lambda b: to_the_end(b.numbers)),
    "numbers in an ordered dict": (lambda b: b.ordered.values(), lambda b: b.ordered.move_to_end("a")),
    "elements of a set": (lambda b: b.set, other_set),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_order_of_what_a_block_holds(name):
    held, change = CHANGES[name]
    block = Block(held)
    assert recordings(block, lambda: change(block)) == 2


def dict_of(values, names):
    return {name: values[name] for name in names}


VALUES = {
    "numbers": {"a": 1.5, "b": 0.5},
    "tensors": {"a": torch.ones(zoo.WIDTH), "b": torch.full((zoo.WIDTH,), 2.0)},
    "functions": {"a": torch.tanh, "b": torch.sigmoid},
}


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("name", VALUES)
def test_another_order_of_arguments(name, by_name):
    order = itertools.chain(["ab"] * 2, ["ba"] * 2)

    def arguments():
        given = dict_of(VALUES[name], next(order))
        return ((), given) if by_name else ((given,), {})

    assert recordings(Block(lambda block: ()), lambda: None, arguments=arguments) == 2
