"""A block's state at each call: the same object while nothing changes, and whatever changes is seen."""

import sys
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
import zoo
from changing import recordings
from quantized import Scaled, scaled, wrapping
from torch import nn

from ds_adacc.python_state.reading import read


class Block(nn.Module):
    common = 1.0

    def __init__(self):
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4, bias=False))
        self.tied = self.fc[0]
        self.none = None
        self.scale, self.count, self.held, self.act, self.zero, self.ds_factor = 0.5, 1, [1.0], F.gelu, 0.0, 1.0
        self.register_buffer("mask", torch.ones(4))
        self.u, self.w = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        self.slotted = Slotted()
        self.wrapping, self.scaled = wrapping(4, 4), scaled(4, 4)


class Slotted(nn.Identity):
    __slots__ = ("factor", "unset")

    def __init__(self):
        super().__init__()
        self.factor = 1.0


class Other(Block):
    pass


def exchange(block):
    """The parameters keep their order, and get one another's names."""
    u, w = block._parameters.pop("u"), block._parameters.pop("w")
    block._parameters.update({"w": u, "u": w})


CHANGES = {
    "a number": lambda block: setattr(block, "scale", 0.25),
    "a number's type": lambda block: setattr(block, "count", True),
    "a zero's sign": lambda block: setattr(block, "zero", -0.0),
    "a number that is named as DeepSpeed's are": lambda block: setattr(block, "ds_factor", 2.0),
    "a number in a slot": lambda block: setattr(block.slotted, "factor", 2.0),
    "a slot that was not set": lambda block: setattr(block.slotted, "unset", 2.0),
    "the mode": lambda block: block.fc[1].eval(),
    "an attribute more": lambda block: setattr(block.fc[2], "extra", 1),
    "an attribute less": lambda block: delattr(block, "none"),
    "attributes in another order": lambda block: setattr(block, "none", block.__dict__.pop("none")),
    "an item of a list": lambda block: block.held.append(1),
    "a function": lambda block: setattr(block, "act", F.silu),
    "a class": lambda block: setattr(block, "__class__", Other),
    "an attribute of the class": lambda block: setattr(Block, "common", 2.0),
    "a parameter": lambda block: setattr(block.fc[0], "weight", nn.Parameter(torch.ones(4, 4))),
    "a frozen parameter": lambda block: block.u.requires_grad_(False),
    "a parameter's dtype": lambda block: setattr(block.u, "data", block.u.data.half()),
    "a tensor in a parameter": lambda block: setattr(block.wrapping.weight, "codes", torch.ones(4, 8)),
    "a tensor that an attribute of a parameter has": lambda block: setattr(
        block.scaled.weight.state, "scales", torch.ones(4, 4)
    ),
    "no parameter": lambda block: setattr(block.fc[0], "bias", None),
    "a parameter in place of none": lambda block: setattr(block.fc[2], "bias", nn.Parameter(torch.ones(4))),
    "parameters with other names": exchange,
    "a buffer": lambda block: setattr(block, "mask", torch.ones(2, 2)),
    "a module": lambda block: block.fc.__setitem__(1, nn.Tanh()),
    "a module in place of another one": lambda block: setattr(block, "tied", block.fc[2]),
    "a module more": lambda block: block.fc.append(nn.ReLU()),
    "a module less": lambda block: setattr(block, "tied", None),
    "a hook": lambda block: block.fc[0].register_forward_hook(lambda module, args, output: output * 2),
}


@pytest.fixture(autouse=True)
def common():
    yield
    Block.common = 1.0


def state(block, last=None, more=None):
    return read([block], (), (), more or {}, last)[0]


def test_the_state_is_the_same_object_until_something_changes():
    block = Block()
    first = state(block)
    assert state(block, first) is first
    block.scale = 1.0 / float(block.count + 1)  # another object, the same number
    assert state(block, first) is first
    assert state(block, first, {"global": (int, 1)}).marks == {**first.marks, "global": (int, 1)}
    assert state(Block(), first).marks != first.marks


def test_what_deepspeed_sets_is_no_state_of_the_block():
    block = Block()
    before = state(block)
    for count, name in enumerate(("ds_id", "ds_grads_remaining", "ds_recompute_parameters")):
        setattr(block.fc[0], name, count)
    assert state(block, before).marks == before.marks


def test_what_deepspeed_sets_on_parameters_of_other_classes_is_no_state_of_the_block():
    """Under ZeRO-1 and 2 on those that it trains, under ZeRO-3 on all."""
    block, optimizer = Block(), type("Optimizer", (), {"__module__": "deepspeed.runtime.zero.stage3"})()
    block.u, frozen = Scaled(torch.ones(4)), block.scaled.weight
    before = state(block)
    block.u.grad_accum = torch.ones(4)
    frozen.ds_status, frozen._z3_optimizer, frozen.all_gather = 1, optimizer, lambda: optimizer
    assert state(block, before).marks == before.marks


@pytest.mark.parametrize("make", [lambda n: [torch.ones(3)], lambda n: {"loss": torch.ones(3)}, torch.ones])
def test_what_is_set_at_every_call_has_nothing_else_read_anew(make):
    """As the auxiliary losses that a router keeps."""
    block, known = Block(), None
    for number in range(1, 8):
        block.aux = make(number)
        last, known = known, state(block, known)
        assert known.marks == state(block).marks
    assert known.objects is last.objects and known.objects.changes == {"block.aux": 2}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name):
    block = Block()
    before = state(block)
    CHANGES[name](block)
    after = state(block, before)
    assert after.marks != before.marks
    assert after.marks == state(block).marks
    assert state(block, after) is after


def test_a_state_keeps_nothing_alive(uncollected):
    block = Block()
    block.self = [block]
    known, parameter = state(block), weakref.ref(block.fc[0].weight)
    block.self.clear()
    del block
    assert parameter() is None
    assert known.structure.unchanged([Block()]) is None


@pytest.mark.parametrize("name", ["block", "Layer"])
@pytest.mark.parametrize("of_class", [False, True])
def test_an_attribute_is_told_from_a_global_and_an_attribute_of_the_class_of_the_same_name(name, of_class, monkeypatch):
    """A file block.py may have a class `block`, with an attribute that has the name of a global of the file."""
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(
        f"from torch import nn\n"
        "scale = 1.0\n"
        f"class {name}(nn.Module):\n"
        "    scale = 1.0\n"
        "    def __init__(self, width):\n"
        "        super().__init__()\n"
        "        self.fc1, self.fc2 = nn.Linear(width, width), nn.Linear(width, width)\n"
        "    def forward(self, x):\n"
        "        return self.fc2(self.fc1(x).tanh() * (self.scale * scale * type(self).scale))\n",
        vars(module),
    )
    block = vars(module)[name](zoo.WIDTH)
    block.scale = 1.0

    def change():
        (type(block) if of_class else block).scale = 3.0

    assert recordings(block, change) == 2


def test_a_hook_is_told_from_the_attribute_that_has_its_handle():
    block = zoo.HolderBlock()
    block.hook0 = block.register_forward_hook(lambda module, given, output: output.tanh())

    def change():
        block.hook0.remove()
        block.hook0 = block.register_forward_hook(lambda module, given, output: output.sigmoid())

    assert recordings(block, change) == 2
