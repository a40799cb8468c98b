"""What a block depends on besides its tensors is seen to change: attributes, submodules, parameters, arguments."""

import array
import collections
import contextvars
import copy
import ctypes
import dataclasses
import functools
import itertools
import logging
import multiprocessing
import random
import threading
import types
import weakref
from typing import ClassVar

import numpy as np
import pydantic
import pytest
import torch
import torch.nn.functional as F
import zoo
from any_size import Training
from recomputing import recomputing
from torch import nn

from ds_adacc.config import load
from ds_adacc.execute.block import Block
from ds_adacc.program.signature import flatten
from ds_adacc.python_state.guards import guards_of_values
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.runtime.wrap import wrap_blocks


def batch():
    return torch.randn(2, 9, zoo.WIDTH, requires_grad=True)


def same_bits(work, block, x, call=None, *args):
    call = call or functools.partial(work.checkpoint, block)
    zoo.assert_exact(block, (x, *args), {}, call)


REPLACED = {
    "module": ("inner", nn.GELU(), nn.SiLU()),
    "function": ("act", F.gelu, F.silu),
    "none": ("number", None, 3.0),
    "tuple": ("pair", (1.0,), (3.0,)),
    "object": ("config", types.SimpleNamespace(t=1.0), types.SimpleNamespace(t=3.0)),
    "numpy": ("scalar", np.float32(1), np.float32(3)),
}


@pytest.mark.parametrize("name", REPLACED)
def test_what_a_block_holds_may_be_replaced(name):
    attribute, before, after = REPLACED[name]
    work, block = recomputing(), zoo.HolderBlock()
    for value in (before, before, after):
        setattr(block, attribute, value)
        same_bits(work, block, batch())
    assert work.recordings == 2


@pytest.mark.parametrize("held", [np.arange(3.0), torch.ones(2, 2).to_sparse(), {1, 2}], ids=type)
def test_a_number_may_change_beside_what_has_an_equality_of_its_own(held):
    work, block = recomputing(), zoo.HolderBlock()
    block.held = held
    for number in (1.0, 1.0, 2.0, 2.0, 3.0, 4.0, 5.0):
        block.number = number
        same_bits(work, block, batch())
    assert work.recordings == 3


def test_parameters_may_be_replaced_and_frozen_and_hooks_added():
    work, block = recomputing(), zoo.HolderBlock()
    for _ in range(2):
        same_bits(work, block, batch())
    block.fc1.bias = nn.Parameter(torch.full_like(block.fc1.bias, 2.0))
    same_bits(work, block, batch())
    block.fc2.weight.requires_grad_(False)
    same_bits(work, block, batch())
    block.fc1.register_forward_hook(lambda module, args, output: output * 3)
    same_bits(work, block, batch())
    assert work.recordings == 4


SCHEDULES = (lambda h, step: h * (1.0 + 0.5 * max(0, step - 6)), lambda h, step: h * (0.3 + 0.15 * step) * max(step, 6))


@pytest.mark.parametrize("use", SCHEDULES)
def test_a_settled_number_may_begin_to_matter_later(use, caplog):
    work, block = recomputing(), zoo.HolderBlock()
    block.use = use
    with caplog.at_level(logging.WARNING, logger="ds_adacc"):
        for step in range(12):
            block.step = step
            same_bits(work, block, batch())
    assert work.recordings <= 4
    (warning,) = [line for line in caplog.messages if "keeps changing" in line]
    assert "block.step" in warning


def test_a_number_that_changes_seldom_never_ends_the_replays(caplog):
    work, block = recomputing(), zoo.HolderBlock()
    block.use = lambda h, rate: h * rate
    for rate in range(1, 11):
        block.step = rate / 10
        for _ in range(64):
            work.checkpoint(block, batch())
        same_bits(work, block, batch())
    assert work.recordings == 10
    assert not any(variant.doubt for variant in work.blocks.all()[0].variants())
    assert "keeps changing" not in caplog.text and "recorded anew" not in caplog.text


def test_nor_does_it_where_a_block_is_called_in_two_ways():
    """With and without a gradient of its input, say. The second way is recorded a call later than the first."""
    work, block = recomputing(), zoo.HolderBlock()
    block.use = lambda h, rate: h * rate
    for rate in (0.1, 0.3, 0.2, 0.5):
        block.step = rate
        for call in range(66):
            work.checkpoint(block, batch().requires_grad_(call % 2 == 0))
    assert work.recordings == 8
    (known,) = work.blocks.all()
    assert not any(variant.doubt for variant in known.variants())
    resumed = Block.from_plain(known.to_plain())
    assert (
        (resumed.calls_since_change, resumed.had_settled) == (known.calls_since_change, known.had_settled) == (65, True)
    )


class Remembering(zoo.HolderBlock):
    """Notes something at every call, in this attribute."""

    def __init__(self, note):
        super().__init__()
        self.note, self.seen, self.by, self.calls = note, [], {}, collections.deque(maxlen=3)

    def forward(self, x):
        self.note(self, x)
        return super().forward(x)


NOTES = {
    "a list of numbers": lambda block, x: block.seen.append(0.5),
    "a list of shapes": lambda block, x: block.seen.append(tuple(x.shape)),
    "the keys of a dict": lambda block, x: block.by.update({len(block.by): "step"}),
    "another dict": lambda block, x: setattr(
        block, "by", {id(object()): 1, len(block.seen): 1, "n": block.seen.append(1)}
    ),
    "the last strings": lambda block, x: setattr(block, "seen", [*block.seen, str(object())][-3:]),
    "the last strings in a deque": lambda block, x: block.calls.append(str(object())),
}


@pytest.mark.parametrize("note", NOTES.values(), ids=NOTES)
def test_a_container_that_keeps_changing_is_not_recorded_for_ever(note, caplog):
    work, block = recomputing(), Remembering(note)
    for _ in range(20):
        same_bits(work, block, batch())
    assert work.recordings <= 9
    assert caplog.text.count("which keeps changing") == 1


def test_a_shape_that_a_block_notes_is_the_same_in_the_next_call():
    work, block = recomputing(), Remembering(lambda block, x: setattr(block, "seen", x.shape))
    for _ in range(4):
        same_bits(work, block, batch())
    assert work.recordings == 1


def test_a_cache_that_fills_and_settles_costs_no_replays(caplog):
    work, block = recomputing(), Remembering(lambda block, x: block.by.setdefault(len(block.by) % 5, x.detach()))
    for _ in range(12):
        same_bits(work, block, batch())
    assert work.recordings <= 6
    assert "keeps changing" not in caplog.text


def test_a_settled_container_may_begin_to_matter_later():
    work, block = recomputing(), zoo.HolderBlock()
    block.seen = []
    block.use = lambda h, step: h * max(1, len(block.seen) - 12)
    for _ in range(20):
        block.seen.append(1.0)
        same_bits(work, block, batch())
    assert work.recordings <= 9


class Through(zoo.HolderBlock):
    """Computes with the modules in a list, which may be layers of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList((nn.Tanh(), nn.Sigmoid(), nn.ReLU(), nn.SiLU(), nn.GELU()))
        self.others = []

    def forward(self, x):
        for other in self.others:
            x = other(x)
        return super().forward(x)


def test_modules_in_a_container_that_grows_are_looked_at_at_every_call(caplog):
    work, block = recomputing(), Through()
    for _ in range(12):
        same_bits(work, block, batch())
        block.others.append(nn.Tanh())
    assert work.recordings == 12
    assert "has been recorded anew 8 times, since block.others had changed each time" in caplog.text


class Masked(zoo.HolderBlock):
    """Keeps the mask of each length that it has met."""

    def __init__(self):
        super().__init__()
        self.masks = {}

    def forward(self, x):
        length = x.shape[1]
        if length not in self.masks:
            self.masks[length] = torch.ones(length, length).tril()
        return super().forward(self.masks[length] @ x)


def test_a_cache_that_grows_with_each_new_size_is_named_and_the_sizes_are_not(caplog):
    work, block = recomputing(), Masked()
    for length in range(4, 13):
        same_bits(work, block, torch.randn(2, length, zoo.WIDTH, requires_grad=True))
    assert "has been recorded anew 8 times, since block.masks had changed each time" in caplog.text
    assert "sizes of its tensors" not in caplog.text


class Switched(zoo.HolderBlock):
    """Two layers have a list of their own of what is active, as those of peft have of their adapters."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Identity(), nn.Identity()
        self.switch("a")

    def switch(self, name):
        self.first.active, self.second.active = [name], [name]

    def forward(self, x):
        return super().forward(x.sin() if self.first.active == self.second.active == ["a"] else x.cos())


def test_what_changes_together_is_told_of_in_one_warning(caplog):
    work, block = recomputing(), Switched()
    for count in range(20):
        block.switch("ab"[count % 2])
        same_bits(work, block, torch.randn(2, 4 + count, zoo.WIDTH, requires_grad=True))
    (told,) = [line for line in caplog.messages if "had changed each time" in line]
    assert "recorded anew 8 times, since block.first.active (and 1 more) had changed each time" in told


def test_what_changes_less_often_is_named_when_its_turn_comes(caplog):
    work, block = recomputing(), Switched()
    for count in range(40):
        block.first.active, block.second.active = ["ab"[count % 2]], ["ab"[count // 2 % 2]]
        same_bits(work, block, torch.randn(2, 4 + count, zoo.WIDTH, requires_grad=True))
    told = [line for line in caplog.messages if "had changed each time" in line]
    often, seldom = (next(text for text in told if f"block.{name}.active" in text) for name in ("first", "second"))
    assert "recorded anew 8 times" in often and "recorded anew 8 times" in seldom and "more)" not in often + seldom
    assert len(told) == 2


def test_weights_that_functional_call_puts_in_place_are_new_at_each_call_and_recorded_once():
    work, block, x = recomputing(), zoo.GPTBlock(dropout=0.0), batch()
    served, gradients = copy.deepcopy(block), {}
    wrap_blocks({"": served}, work)
    for factor in (1.0, 1.1, 1.2):
        for module in (block, served):
            weights = {name: factor * weight for name, weight in module.named_parameters()}
            output = torch.func.functional_call(module, weights, (x,))
            gradients[module] = torch.autograd.grad(output.square().sum(), (x, *module.parameters()))
        zoo.assert_same(*gradients.values())
        kept = weakref.ref(weights["fc1.weight"])
        del weights, output
    assert work.recordings == 1
    assert kept() is None


def test_layers_that_a_block_chooses_from_its_own_are_looked_at_at_every_call(caplog):
    work, block = recomputing(), Through()
    orders = [order for count in (1, 2, 3) for order in itertools.permutations(block.layers, count)][:24]
    for order in orders:
        block.others = list(order)
        same_bits(work, block, batch())
    assert work.recordings == len(orders)
    assert "keeps changing" not in caplog.text


def test_a_hook_that_is_registered_anew_each_time_is_the_same_hook():
    work, block, seen = recomputing(), zoo.HolderBlock(), {}

    def keep(module, given, output):
        seen["output"] = output

    for _ in range(6):
        hooks = block.hooks = [
            block.fc1.register_forward_hook(keep),
            block.fc2.register_full_backward_hook(lambda *_: None),
        ]
        same_bits(work, block, batch())
        for hook in hooks:
            hook.remove()
    assert work.recordings <= 2


def test_a_hook_that_is_registered_in_another_way_is_another_program():
    def tripled(module, *args):
        return args[-1] * len(args)  # it is given the keyword arguments too, if it asks for them

    work, block = recomputing(), zoo.HolderBlock()
    for with_kwargs in (False, False, True, True):
        hook = block.fc1.register_forward_hook(tripled, with_kwargs=with_kwargs)
        same_bits(work, block, batch())
        hook.remove()
    assert work.recordings == 2


@pytest.mark.parametrize("lengths", [(9,), (9, 12, 15, 11)])
def test_a_number_among_the_arguments_that_keeps_changing_is_told_of(lengths, caplog):
    class Packed(zoo.HolderBlock):
        def forward(self, x, scale, *, longest, causal=True):
            return super().forward(x) * scale

    work, block = recomputing(), Packed()
    for step in range(10):
        x = torch.randn(2, lengths[step % len(lengths)], zoo.WIDTH)
        arguments = (x, float(step % 2)), {"longest": 100 + step}
        call = functools.partial(work.checkpoint, block)
        zoo.assert_same_bits(zoo.gradients(block, *arguments), zoo.gradients(block, *arguments, call))
        said = [line for line in caplog.messages if "has had" in line]
        assert len(said) == (step >= 7), "it is told once, and with the eighth value"
    assert "its argument 'longest' has had 8 values" in said[0]
    assert work.recordings == 10


def test_numbers_of_two_submodules_of_one_class_are_told_apart():
    class Scale(nn.Module):
        t = 1.0

        def forward(self, x):
            return F.gelu(x * self.t)

    block = nn.Sequential(nn.Linear(zoo.WIDTH, zoo.WIDTH), Scale(), nn.Linear(zoo.WIDTH, 8), Scale())
    work = recomputing()
    block[3].t = 1.0
    for step in range(8):
        block[1].t = 1.0 + 0.1 * step
        block[3].t = 1.0 if step < 6 else 3.0
        same_bits(work, block, batch())


@dataclasses.dataclass(slots=True)
class Slots:
    number: float = 1.0


class Model(pydantic.BaseModel):
    number: float = 1.0


class Numbers(list):
    pass


class Shared:
    number = 1.0


class Number(float):
    number = 1.0


class OfItems(dict):
    """Raises KeyError for an attribute that is no item, as those of many scripts do."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Kind(type):
    number = 1.0

    def __getattr__(cls, name):
        return {"first": cls.numbers}[name][0]


class OfKind(metaclass=Kind):
    pass


Kind.numbers = [1.0]

INNER, OTHER = nn.Linear(1, 1), nn.Linear(1, 1)


def own(value, number):
    value.number = number


def in_place(value, number):
    value[0] = number


def of_set(value, number):
    value.clear()
    value.add(number)


def of_key(value, number):
    value[INNER] = number


NOTHING, ALSO_NOTHING = object(), object()


def of_itself(value, number):
    value[0] = NOTHING if number == 1.0 else ALSO_NOTHING


class Array(np.ndarray):
    pass


class Both(dict):
    """A config whose attributes are set beside the items that it was made of."""


# An object, how a number is read from it, and how it is changed within the object.
CHANGING = {
    "slots": (Slots, lambda v: v.number, own),
    "pydantic": (Model, lambda v: v.number, own),
    "set": (lambda: {1.0}, sum, of_set),
    "deque": (lambda: collections.deque([1.0]), sum, in_place),
    "array": (lambda: array.array("d", [1.0]), sum, in_place),
    "numpy": (lambda: np.ones(1), lambda v: float(v[0]), in_place),
    "masked": (lambda: np.ma.array([1.0, 2.0]), lambda v: float(v.sum()), lambda v, n: setattr(v, "mask", [n > 1, 0])),
    "attribute of an array": (lambda: Array(1), lambda v: getattr(v, "number", 1.0), own),
    "attribute of a list": (lambda: Numbers([1]), lambda v: getattr(v, "number", 1.0), own),
    "long list": (lambda: [1.0] * 1000, lambda v: v[0], in_place),
    "context variable": (lambda: contextvars.ContextVar("n", default=1.0), lambda v: v.get(), lambda v, n: v.set(n)),
    "thread local": (threading.local, lambda v: getattr(v, "number", 1.0), own),
    "weak": (lambda: weakref.ref(Shared), lambda v: v().number, lambda v, n: own(v(), n)),
    "class": (Shared, lambda v: v.number, lambda v, n: own(type(v), n)),
    "attribute of a number": (lambda: Number(1.0), lambda v: v.number, own),
    "attribute of an item's name": (lambda: Both(number=1.0), lambda v: v.number, own),
    "items as attributes": (lambda: OfItems(number=1.0), lambda v: v.number, own),
    "metaclass": (lambda: OfKind, lambda v: v.number, lambda v, n: own(Kind, n)),
    "what a metaclass finds": (lambda: OfKind, lambda v: v.first, lambda v, n: in_place(Kind.numbers, n)),
    "first of two keys of one text": (lambda: {INNER: 1.0, OTHER: 2.0}, lambda v: v[INNER], of_key),
    "name with a dot": (lambda: {"a.b": 1.0, "a": {"b": 2.0}}, lambda v: v["a.b"], lambda v, n: v.update({"a.b": n})),
    "nothing but itself": (lambda: [NOTHING], lambda v: 1.0 + (v[0] is NOTHING), of_itself),
    "bound method": (lambda: [1.0].__getitem__, lambda v: v(0), lambda v, n: in_place(v.__self__, n)),
    "number in C": (lambda: ctypes.c_double(1.0), lambda v: v.value, lambda v, n: setattr(v, "value", n)),
    "shared number": (lambda: multiprocessing.Value("d", 1.0), lambda v: v.value, lambda v, n: setattr(v, "value", n)),
    "array in C": (lambda: (ctypes.c_double * 2)(1.0, 2.0), lambda v: v[0], in_place),
    "length": (lambda: [1].__len__, lambda v: v(), lambda v, n: v.__self__.__setitem__(slice(None), [1] * int(n))),
    "closure": (lambda: closure()[0], lambda v: v(), lambda v, n: v.__closure__[0].cell_contents.__setitem__(0, n)),
}


def closure():
    numbers = [1.0]
    return lambda: numbers[0], numbers


@pytest.fixture
def shared():
    yield
    Shared.number = Kind.number = Kind.numbers[0] = 1.0


@pytest.mark.parametrize("as_argument", [False, True])
@pytest.mark.parametrize("name", CHANGING)
def test_a_number_may_change_within_an_object(name, as_argument, shared):
    make, read, change = CHANGING[name]
    work, block, held = recomputing(), zoo.HolderBlock(), make()
    block.use = lambda h, step: h if as_argument else h * read(held)
    block.held = None if as_argument else held
    for number in (1.0, 1.0, 3.0, 3.0):
        change(held, number)
        extra = (lambda h, held=held: h * read(held)) if as_argument else None
        same_bits(work, block, batch(), None, *([extra] if as_argument else []))
    assert work.recordings == 2


of_items = OfItems(number=1.0)


@pytest.mark.parametrize("number", [1.0, 3.0])
def test_a_global_whose_items_are_attributes(number):
    of_items.number = number
    work, block = recomputing(), zoo.HolderBlock()
    block.use = lambda h, step: h * of_items.number
    for _ in range(2):
        same_bits(work, block, batch())
    assert work.recordings == 1


def test_a_parameter_may_be_a_key():
    work, block = recomputing(), zoo.HolderBlock()
    parameter = next(block.parameters())
    block.held, block.use = {parameter: 2.0}, lambda h, step: h * block.held[parameter]
    for _ in range(3):
        same_bits(work, block, batch())
        parameter.data.add_(1)
    assert work.recordings == 1


@pytest.mark.parametrize("name", ["number", "nothing", "inner"])
@pytest.mark.parametrize("as_argument", [False, True])
def test_a_number_may_change_in_a_python_module_that_a_block_holds_or_is_given(as_argument, name):
    """As a config that a trainer imports. What the block does not read of it may change."""
    config = types.ModuleType("config_of_a_user")
    config.inner = types.ModuleType("config_of_a_user.inner")
    config.number, config.nothing, config.inner.number = 1.0, None, 1.0
    work, block = recomputing(), zoo.HolderBlock()

    def scaled(h, config):
        return h * config.number * (config.nothing or 1.0) * config.inner.number

    block.held = None if as_argument else {"config": config}
    block.use = lambda h, step: h if as_argument else scaled(h, block.held["config"])
    forward = block.forward
    block.forward = lambda x, *given: forward(x) if not given else torch.tanh(block.fc2(scaled(block.fc1(x), *given)))
    for step, number in enumerate((1.0, 1.0, 3.0, 3.0)):
        config.unread = step
        setattr(config.inner if name == "inner" else config, "nothing" if name == "nothing" else "number", number)
        same_bits(work, block, batch(), None, *([config] if as_argument else []))
    assert work.recordings == 2


class Scales(dict):
    """As a config that a block is given."""


class Pair(tuple):
    pass


GIVEN = {
    "attribute of a dict": (Scales, lambda v: getattr(v, "number", 1.0), own),
    "attribute of a list": (lambda: Numbers([1]), lambda v: getattr(v, "number", 1.0), own),
    "attribute of a tuple": (lambda: Pair((1,)), lambda v: getattr(v, "number", 1.0), own),
    "default": (
        lambda: collections.defaultdict(functools.partial(float, 1.0)),
        lambda v: v.default_factory(),
        lambda v, n: setattr(v, "default_factory", functools.partial(float, n)),
    ),
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_number_may_change_in_a_container_that_is_itself_an_argument(name):
    make, read, change = GIVEN[name]
    work, block, given = recomputing(), zoo.HolderBlock(), make()
    block.forward = lambda x, given: torch.tanh(block.fc2(torch.tanh(block.fc1(x)) * read(given)))
    for number in (1.0, 1.0, 3.0, 3.0):
        change(given, number)
        same_bits(work, block, batch(), None, given)
    assert work.recordings == 2


def test_tensors_among_the_attributes_of_a_container_that_are_items_too_are_one():
    """As those of what a model of transformers returns."""
    given, tensors, inner = Scales(), [], []
    given["x"] = given.x = torch.ones(2)
    given.y = torch.ones(3)
    flatten(given, tensors, inner)
    assert [tuple(each.shape) for each in (*tensors, *inner)] == [(2,), (3,)]


def splitting(x, lengths: torch.Tensor):
    if x.dim() > 1:
        sizes: list[int] = lengths.tolist()
        return torch.split(x, sizes)[0]
    return x


def calling(x, lengths: torch.Tensor):
    return splitting(x, lengths)


class Raising(list):
    def __iter__(self):
        raise RuntimeError("not now")


UNREADABLE = {
    "iterator": lambda: itertools.count(2),
    "generator": lambda: iter(list(range(2, 50))),
    "random": lambda: random.Random(3),
    "set of objects": lambda: {Slots},
    "proxy of nothing": lambda: [weakref.proxy(Shared())],
    "raises": lambda: Raising(),
    "large array": lambda: np.ones(1 << 16),
    "pointer": lambda: ctypes.pointer(ctypes.c_double(2.0)),
    "script": lambda: torch.jit.script(splitting),
    "script that calls one": lambda: torch.jit.script(calling),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_nothing_is_recomputed_that_depends_on_what_cannot_be_read(name, caplog):
    work, block = recomputing(), zoo.HolderBlock()
    block.held = UNREADABLE[name]()
    with caplog.at_level(logging.WARNING, logger="ds_adacc"):
        for _ in range(3):
            same_bits(work, block, batch())
    assert work.recordings == 1
    ((_, variant),) = work.blocks.variants()
    assert variant.bound.is_trivial and not any(op.replayable for op in variant.bound.recording.ops)
    (warning,) = [line for line in caplog.messages if "cannot watch" in line]
    assert "block.held" in warning


def test_a_branch_on_a_settled_number_is_not_taken_for_another():
    work, block = recomputing(), zoo.HolderBlock()
    block.use = lambda h, step: torch.sin(h) if step < 6 else torch.cos(h)
    for step in range(9):
        block.step = step
        same_bits(work, block, batch())
    assert work.recordings == 3


ARGUMENTS = (
    (np.float32(1), np.float32(3)),
    (slice(0, 4), slice(5, 9)),
    (F.gelu, torch.sin),
    (range(1, 2), range(3, 4)),
)


@pytest.mark.parametrize("pair", ARGUMENTS)
def test_arguments_of_any_type_are_told_apart(pair):
    work, block = recomputing(), zoo.HolderBlock()
    for extra in (pair[0], pair[0], pair[1]):
        same_bits(work, block, batch(), None, extra)
    assert work.recordings == 2


class Runner:
    def __init__(self, module):
        self.module = module

    def __call__(self, x):
        return self.module(x)


layer = None


def run_module(module, x):
    return module(x)


CALLS = (
    lambda work, block, x: work.checkpoint(run_module, block, x),
    lambda work, block, x: work.checkpoint(Runner(block), x),
    lambda work, block, x: work.checkpoint(lambda x: layer(x), x),
)


@pytest.mark.parametrize("call", CALLS)
def test_modules_are_reached_as_arguments_attributes_and_globals(call):
    global layer
    work, blocks = recomputing(), [zoo.HolderBlock(number) for number in (1.0, 3.0)]
    for _ in range(3):
        for layer in blocks:
            same_bits(work, layer, batch(), functools.partial(call, work, layer))
    assert work.recordings == 2
    assert all(len(variant.bound.recording.parameters) >= 2 for _, variant in work.blocks.variants())


class Tagged(torch.Tensor):
    pass


UNPLANNABLE = (lambda x: x.to_sparse(), lambda x: x.as_subclass(Tagged), lambda x: torch.nested.nested_tensor([x, x]))


@pytest.mark.parametrize("make", UNPLANNABLE)
def test_arguments_that_cannot_be_recorded_run_plain_with_one_warning(make, caplog):
    work, block = recomputing(), zoo.HolderBlock()
    with caplog.at_level(logging.WARNING, logger="ds_adacc"):
        for _ in range(3):
            same_bits(work, block, batch(), None, make(torch.ones(3, 3)))
    assert len([line for line in caplog.messages if "plain autograd" in line]) == 1
    assert work.recordings == 0


class Fussy(nn.Module):
    """What it does with a sparse tensor cannot be recorded."""

    def __init__(self, is_sparse):
        super().__init__()
        self.is_sparse, self.calls = is_sparse, 0
        self.up, self.down = nn.Linear(zoo.WIDTH, zoo.WIDTH), nn.Linear(zoo.WIDTH, zoo.WIDTH)

    def forward(self, x):
        self.calls += 1
        if self.is_sparse:
            torch.eye(3).to_sparse().sum()
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def test_a_block_that_could_not_be_recorded_is_tried_again_in_another_state():
    training = Training(lambda: Fussy(True), memory_budget=0.7, rectifier={"enabled": False})
    training.compare(9)
    assert not training.agreement.known_types
    for block in training.blocks:
        block.is_sparse, block.calls = False, 0
    training.compare(9)
    assert training.agreement.known_types


def test_a_block_that_can_never_be_recorded_is_not_tried_at_every_call():
    training = Training(lambda: Fussy(True), memory_budget=0.7, rectifier={"enabled": False})
    for _ in range(8):
        training.compare(9)
    assert training.runtime.recordings == 3 * len(training.blocks)


def test_a_factor_in_a_closure_makes_no_new_block(caplog):
    """A new closure at every step, with another factor each time: two recordings tell that it keeps changing."""
    runtime, block, x = Runtime(load({"adacc": {"codecs": "none"}})), zoo.Tiny(), torch.randn(2, 4, requires_grad=True)

    def scaled(factor):
        return lambda x: block(x) * factor

    for step in range(12):
        factor = 1 + step / 8
        (found,) = torch.autograd.grad(runtime.checkpoint(scaled(factor), x).sum(), [x])
        (expected,) = torch.autograd.grad((block(x) * factor).sum(), [x])
        assert torch.equal(found, expected)
    assert len(runtime.blocks.all()) == 1 and runtime.recordings == 3
    assert caplog.text.count("which keeps changing") == 1


def test_a_whole_number_in_a_closure_tells_blocks_apart():
    runtime, blocks, x = Runtime(load({"adacc": {"codecs": "none"}})), [zoo.Tiny(), zoo.Tiny()], torch.randn(2, 4)

    def through(start):  # as Megatron makes them of its layers
        return lambda x: blocks[start](x)

    for start in (0, 1, 0, 1):
        runtime.checkpoint(through(start), x.requires_grad_()).sum().backward()
    assert len(runtime.blocks.all()) == 2


class OneOfEach(type):
    """The metaclass of singletons."""

    made: ClassVar[dict[type, object]] = {}

    def __call__(cls):
        return cls.made.setdefault(cls, super().__call__())


class Counts(metaclass=OneOfEach):
    count = 0


class Settings(metaclass=OneOfEach):
    scale = 2.0


def test_the_only_objects_of_other_classes_are_none_of_a_block_s():
    """The metaclass knows them all, and a block that holds one of them would be recorded for each change of another."""
    held = Settings()
    Counts()
    marks = guards_of_values({"held": held})
    assert "Settings.scale" in marks and "OneOfEach" in marks
    assert not any("Counts" in name or "made" in name for name in marks)
