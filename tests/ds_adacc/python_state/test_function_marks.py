"""The functions of the user's classes may be replaced, and so may what they hold."""

import dataclasses
import functools
import types

import pytest
import torch
import zoo
from changing import recordings
from torch import nn


def block_of():
    """A block of a new class, with a child of a new class."""

    class Child(nn.Module):
        def forward(self, x):
            return torch.tanh(x)

    class Common(nn.Module):
        def act(self, x, k=1.0, *, shift=0.0):
            return torch.tanh(x * k + shift)

    class Other(nn.Module):
        def act(self, x):
            return torch.sigmoid(x)

    class Block(Common):
        child_class = Child

        def __init__(self):
            super().__init__()
            self.fc1, self.fc2, self.child = nn.Linear(zoo.WIDTH, zoo.WIDTH), nn.Linear(zoo.WIDTH, 8), Child()

        @staticmethod
        def halved(x):
            return x / 2

        @classmethod
        def doubled(cls, x):
            return x * 2

        def times(self, x, k):
            return x * k

        tripled = functools.partialmethod(times, k=3.0)

        @property
        def factor(self):
            return 1.5

        def __call__(self, *args):
            return super().__call__(*args)

        def forward(self, x):
            h = self.act(self.child(self.fc1(x)))
            h = self.child_class()(self.tripled(self.doubled(self.halved(h)))) * self.factor
            return self.fc2(torch.sin(h))

    Block.Common, Block.Other, Block.Child = Common, Other, Child
    return Block


def another_forward(self, x):
    return self.fc2(torch.sigmoid(self.fc1(x)).cos())


class Cosine(nn.Module):
    def forward(self, x):
        return torch.cos(x)


CHANGES = {
    "method": lambda block: setattr(block, "act", lambda self, x: torch.sigmoid(x)),
    "forward": lambda block: setattr(block, "forward", another_forward),
    "call": lambda block: setattr(block, "__call__", lambda self, x: another_forward(self, x)),
    "forward of a child": lambda block: setattr(block.Child, "forward", lambda self, x: torch.sigmoid(x)),
    "method of a base": lambda block: setattr(block.Common, "act", lambda self, x: torch.sigmoid(x)),
    "bases": lambda block: setattr(block, "__bases__", (block.Other,)),
    "code": lambda block: setattr(block.act, "__code__", block.Other.act.__code__),
    "default": lambda block: setattr(block.act, "__defaults__", (3.0,)),
    "named default": lambda block: setattr(block.act, "__kwdefaults__", {"shift": 0.5}),
    "item of the named defaults": lambda block: block.act.__kwdefaults__.update(shift=0.5),
    "static method": lambda block: setattr(block, "halved", staticmethod(torch.sigmoid)),
    "class method": lambda block: setattr(block, "doubled", classmethod(lambda cls, x: x * 3)),
    "partial method": lambda block: setattr(block, "tripled", functools.partialmethod(block.times, k=0.3)),
    "property": lambda block: setattr(block, "factor", property(lambda self: 0.7)),
    "class": lambda block: setattr(block, "child_class", Cosine),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_class_holds_may_be_replaced(name):
    cls = block_of()
    assert recordings(cls(), lambda: CHANGES[name](cls)) == 2


def test_two_classes_of_one_name_are_told_apart():
    first, second = block_of().Child, block_of().Child
    block = nn.Sequential(nn.Linear(zoo.WIDTH, zoo.WIDTH), first(), nn.Linear(zoo.WIDTH, 8), second())
    changes = [functools.partial(setattr, cls, "forward", lambda self, x: torch.sigmoid(x)) for cls in (first, second)]
    assert recordings(block, *changes) == 3


def test_methods_of_objects_may_be_replaced():
    @dataclasses.dataclass
    class Activation:
        scale: float = 1.0

        def of(self, x):
            return torch.tanh(x) * self.scale

    block = zoo.HolderBlock()
    held = Activation()
    block.use = lambda h, step: held.of(h)
    assert recordings(block, lambda: setattr(Activation, "of", lambda self, x: torch.sigmoid(x))) == 2


FILES = {
    "bare": "def act(x):\n    return (x * SCALE).tanh()",
    "with a default": "def act(x, power=2.0):\n    return (x * SCALE).tanh()",
    "with a closure": "def make(k):\n    return lambda x: (x * SCALE * k).tanh()\nact = make(1.0)",
    "with a list": "def act(x, shift=[0.0]):\n    return (x * SCALE).tanh() + shift[0]",
}


@pytest.mark.parametrize("name", FILES)
def test_a_function_of_equal_code_with_other_globals_is_another_one(name):
    """As of a file of settings that is run once more."""
    block, file = zoo.HolderBlock(), compile(FILES[name], name, "exec")

    def run(scale):
        settings = {"SCALE": scale}
        exec(file, settings)
        block.act = settings["act"]

    run(2.0)
    block.use = lambda h, step: block.act(h)
    assert recordings(block, lambda: run(3.0)) > 1


def test_a_number_with_a_name_like_pythons_own_may_change():
    """In a class, and in a Python module that a function reads."""
    settings = types.ModuleType("settings_of_a_user")
    settings.__scale__ = 1.0
    block = block_of()()
    type(block).__factor__ = 1.0
    type(block).act = lambda self, x: torch.tanh(x * type(self).__factor__ * settings.__scale__)

    def set_factor():
        type(block).__factor__ = 2.0

    def set_scale():
        settings.__scale__ = 3.0

    assert recordings(block, set_factor, set_scale) == 3


def test_the_class_of_a_block_may_lie_inside_that_of_a_layer():
    class Outer(nn.Module):
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc1, self.fc2, self.outer = nn.Linear(zoo.WIDTH, zoo.WIDTH), nn.Linear(zoo.WIDTH, 8), Outer()

            def act(self, x):
                return torch.tanh(x)

            def forward(self, x):
                return self.fc2(self.outer(self.act(self.fc1(x))))

        def forward(self, x):
            return torch.sin(x)

    assert recordings(Outer.Block(), lambda: setattr(Outer.Block, "act", lambda self, x: torch.sigmoid(x))) == 2
