"""Objects of numbers, strings and tensors are compared by identity: what `Walk` would read anew is never overlooked."""

import copy
import enum
import random
import weakref
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from quantized import scaled, wrapping
from torch import nn

from ds_adacc.python_state.guards import DEPTH, Walk
from ds_adacc.python_state.plain_objects import PlainObjects
from ds_adacc.python_state.reading import read


class Config:
    common = 1

    def __init__(self):
        self.width, self.rate, self.name, self.none, self.flag, self.zero = 1000, 0.5, "gpt", None, True, 0.0
        self.dtype, self.shape, self.empty = torch.float32, (2, 3), ()
        self.rope = {"theta": 1e4, "types": ["full", "sliding"], 1: 2}
        self.sub = Sub(3)
        self.again = self.rope
        self.size, self.space = torch.Size([2, 3]), SimpleNamespace(scale=1.5)
        self.table, self.same_table = torch.ones(2, 3), torch.ones(2, 3)
        self.weight = nn.Parameter(torch.ones(1), requires_grad=False)
        self.scaled, self.wrapped = scaled(2, 2).weight, wrapping(2, 2).weight


@dataclass
class Sub:
    depth: int


class Other(Config):
    pass


class Number(int):
    pass


class Slots:
    __slots__ = ("value",)


class Colour(enum.Enum):
    RED = 1


def plain(value):
    return PlainObjects([("config", value, DEPTH)], {}, {})


def exchange(config):
    """The attributes keep their values, in another order."""
    config.width = config.__dict__.pop("width")


CHANGES = {
    "a number": lambda config: setattr(config, "width", 1001),
    "a number's type": lambda config: setattr(config, "flag", 1),
    "a zero's sign": lambda config: setattr(config, "zero", -0.0),
    "None": lambda config: setattr(config, "none", 0),
    "a dtype": lambda config: setattr(config, "dtype", torch.float64),
    "an attribute more": lambda config: setattr(config, "more", 1),
    "an attribute less": lambda config: delattr(config, "name"),
    "the class": lambda config: setattr(config, "__class__", Other),
    "an item of a dict": lambda config: config.rope.update(theta=2e4),
    "a key of a dict": lambda config: config.rope.update(more=1),
    "a key's type": lambda config: config.rope.update({True: config.rope.pop(1)}),
    "an item of a list": lambda config: config.rope["types"].append("full"),
    "the order of a list": lambda config: config.rope["types"].reverse(),
    "a list in place of a tuple": lambda config: setattr(config, "empty", []),
    "a size in place of a tuple": lambda config: setattr(config, "shape", torch.Size([2, 3])),
    "an inner object's number": lambda config: setattr(config.sub, "depth", 4),
    "two dicts in place of one": lambda config: setattr(config, "again", dict(config.rope)),
    "what is not plain": lambda config: setattr(config, "name", object()),
    "a tensor in place of a string": lambda config: setattr(config, "name", torch.ones(1)),
    "a tensor's shape": lambda config: setattr(config, "table", torch.ones(3, 2)),
    "the shape of a tensor's data": lambda config: setattr(config.table, "data", torch.ones(3, 2)),
    "a tensor's strides": lambda config: config.table.t_().resize_(2, 3).as_strided_((2, 3), (1, 2)),
    "a tensor's dtype": lambda config: setattr(config.table, "data", torch.ones(2, 3).half()),
    "that a tensor requires a gradient": lambda config: config.table.requires_grad_(),
    "a sparse tensor": lambda config: setattr(config, "table", config.table.to_sparse()),
    "a parameter in place of a tensor": lambda config: setattr(config, "table", nn.Parameter(config.table)),
    "another parameter": lambda config: setattr(config, "weight", copy.deepcopy(config.weight)),
    "a parameter that is trained": lambda config: config.weight.requires_grad_(),
    "a parameter's dtype": lambda config: setattr(config.weight, "data", torch.ones(1).half()),
    "an attribute of a frozen parameter": lambda config: setattr(config.scaled, "state", None),
    "an attribute more of a frozen parameter": lambda config: setattr(config.scaled, "block_size", 64),
    "a number in an attribute of a frozen parameter": lambda config: setattr(config.scaled.state, "block_size", 64),
    "a tensor in a parameter": lambda config: setattr(config.wrapped, "codes", torch.ones(1)),
    "a namespace's number": lambda config: setattr(config.space, "scale", 2.5),
    "the order of the attributes": exchange,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name):
    config = Config()
    known = plain(config)
    assert known.places == [0] and known.left == [] and known.unchanged([config]) is not None
    CHANGES[name](config)
    assert known.unchanged([config]) is None


def test_the_marks_are_those_of_a_walk_without_classes():
    config, walk = Config(), Walk()
    walk.value("config", config, DEPTH)
    known = plain(config)
    assert known.kinds == [Config, Sub]
    classes = {name: mark for name, mark in walk.guards.items() if not name.startswith("config")}
    assert {**known.marks, **classes} == walk.guards and classes


NOT_PLAIN = {
    "a sparse tensor": lambda: [torch.ones(1).to_sparse()],
    "a tensor of a class of its own": lambda: [wrapping(1, 1).weight.data],
    "a module": lambda: [nn.Linear(1, 1)],
    "a function": lambda: [lambda x: x],
    "a class": lambda: [Config],
    "a number with attributes": lambda: [Number(1)],
    "an array": lambda: [np.ones(1)],
    "a number of NumPy": lambda: [np.float64(1)],
    "a set": lambda: [{1}],
    "slots": lambda: [Slots()],
    "a member of an enum": lambda: [Colour.RED],
    "a generator": lambda: [torch.Generator()],
    "a reference": lambda: [weakref.ref(Config)],
    "a dict with other keys": lambda: {(1, 2): 1},
    "very many items": lambda: list(range(5000)),
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_may_change_without_its_items_is_left(name):
    value = NOT_PLAIN[name]()
    known = plain(value)
    assert (known.places, known.left, known.marks) == ([], [0], {})
    assert known.unchanged([value]) == []


def test_the_order_of_attributes_is_a_mark():
    config = Config()
    before = plain(config).marks
    exchange(config)
    assert plain(config).marks != before


def test_objects_are_not_kept_alive(uncollected):
    config = Config()
    known, reference = plain(config), weakref.ref(config)
    del config
    assert reference() is None
    assert known.unchanged([None]) is None


def test_an_object_that_holds_itself():
    config = Config()
    config.sub = config
    known = plain(config)
    assert known.unchanged([config]) is not None
    config.sub = copy.copy(config)
    assert known.unchanged([config]) is None


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(1, 1)
        self.fc.config = config


def test_a_block_reads_the_class_of_its_config_at_every_call():
    block = Block(Config())
    before, _ = read([block], (), (), {}, None)
    assert read([block], (), (), {}, before)[0] is before
    assert not [name for name in before.others if "config" in name]
    try:
        Config.common = 2
        after, _ = read([block], (), (), {}, before)
    finally:
        Config.common = 1
    assert after.marks != before.marks and after.objects is before.objects
    weights = {id(each): each for each in vars(block.config).values() if isinstance(each, nn.Parameter)}
    block.config = block.fc.config = copy.deepcopy(block.config, weights)
    again, _ = read([block], (), (), {}, before)
    assert again.marks == before.marks, "an equal config is the same to the block"


TENSORS = torch.ones(2), torch.zeros(2), torch.ones(3), nn.Parameter(torch.ones(2)), scaled(1, 1).weight


def tree(generator, depth=3):
    """A random plain value."""
    kind = generator.choice(("number", "list", "dict", "object") if depth else ("number",))
    if kind == "number":
        return generator.choice((0, 1, True, 0.0, -0.0, 1.0, 1000 * 7, "a", None, torch.float32, *TENSORS))
    items = [tree(generator, depth - 1) for _ in range(generator.randrange(4))]
    if kind == "list":
        return generator.choice((list, tuple))(items)
    if kind == "dict":
        return dict(enumerate(items))
    value = Sub(0)
    value.__dict__.update(zip("abcd", items, strict=False))
    return value


@pytest.mark.parametrize("seed", range(200))
def test_random_values_in_turns(seed):
    """Of two random values, those of one call stand for those of the other only if a walk finds the same marks."""
    generator = random.Random(seed)
    several = [[tree(generator) for _ in range(3)] for _ in range(2)]
    one = several[0]
    other = [generator.choice((a, b, copy.deepcopy(a))) for a, b in zip(*several, strict=True)]
    known = PlainObjects([(f"value{n}", value, DEPTH) for n, value in enumerate(one)], {}, {})

    def marks(values):
        walk = Walk()
        for place in known.places:
            walk.value(f"value{place}", values[place], DEPTH)
        return walk.guards

    assert known.unchanged(one) is not None
    if known.unchanged(other) is not None:
        assert marks(other) == marks(one)
