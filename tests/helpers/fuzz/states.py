"""Random programs with Python state: where a number is kept, how it changes, and what the block does with it."""

from __future__ import annotations

import random
import textwrap
from dataclasses import dataclass

PRELUDE = """
import array, collections, contextvars, dataclasses, enum, functools, itertools, os, random, threading, types, weakref
import numpy as np
import pydantic
import torch
import torch.nn.functional as F
from torch import nn
"""


@dataclass(frozen=True)
class Kept:
    """A place for a number.

    `before`: source of the module; `init`: of the block's constructor; `read`: the expression that gives the number in
    forward; `change`: what the training script runs between two steps, with the `block` and the new `number`.
    `argument`: what it passes to the block as `extra`, if anything. `forward`: lines that forward runs once it has read
    the number, to change it itself.
    """

    read: str
    change: str = ""
    init: str = ""
    before: str = ""
    argument: str = "None"
    forward: str = ""


_BOX = "class Box:\n    def __init__(self, number=1):\n        self.number = number\n"
_SLOTS = "@dataclasses.dataclass(slots=True)\nclass Slots:\n    number: int = 1\n    other: object = None\n"
_MODEL = "class Model(pydantic.BaseModel):\n    number: int = 1\n"
_LIST = "class Numbers(list):\n    pass\n"
_SETTINGS = "settings = types.ModuleType('settings')\nsettings.number = 1\n"
_TABLE = "table = [1, 2, 3, 4, 5, 6, 7, 8]\n"


def _of_attribute(make, read, change, before=""):
    """The same object as an attribute, within a list, as a global, in a closure, and as an argument."""
    return {
        "attribute": Kept(read.format("self.held"), change.format("block.held"), f"self.held = {make}", before),
        "item": Kept(
            read.format("self.many[1]['a']"),
            change.format("block.many[1]['a']"),
            f"self.many = (0, {{'a': {make}}})",
            before,
        ),
        "global": Kept(read.format("held"), f"global held\n{change.format('held')}", "", f"{before}held = {make}\n"),
        "helper": Kept(
            "helper()",
            f"global held\n{change.format('held')}",
            "",
            f"{before}held = {make}\ndef helper():\n    return {read.format('held')}\n",
        ),
        "closure": Kept(
            "self.helper()",
            "block.change(number)",
            "self.helper, self.change = make_helpers()",
            f"{before}def make_helpers():\n    held = {make}\n    def helper():\n        return {read.format('held')}\n"
            "    def change(number):\n        nonlocal held\n"
            f"{textwrap.indent(change.format('held'), ' ' * 8)}\n    return helper, change\n",
        ),
        "argument": Kept(
            read.format("extra"), f"global held\n{change.format('held')}", "", f"{before}held = {make}\n", "held"
        ),
        "class": Kept(
            read.format("self.common"), change.format("Block.common"), "", f"{before}common = {make}\n", "None"
        ),
    }


_OBJECTS = {
    "int": ("1", "{0}", "{0} = number"),
    "list": ("[1, 1]", "{0}[0]", "{0}[0] = number"),
    "dict": ("dict(a=1)", "{0}['a']", "{0}['a'] = number"),
    "object": ("Box()", "{0}.number", "{0}.number = number", _BOX),
    "namespace": ("types.SimpleNamespace(n=1)", "{0}.n", "{0}.n = number"),
    "slots": ("Slots()", "{0}.number", "{0}.number = number", _SLOTS),
    "nested slots": ("Slots(1, Slots())", "{0}.other.number", "{0}.other.number = number", _SLOTS),
    "pydantic": ("Model()", "{0}.number", "{0}.number = number", _MODEL),
    "set": ("set([1])", "sum({0})", "{0}.clear(); {0}.add(number)"),
    "deque": ("collections.deque([1], maxlen=2)", "{0}[-1]", "{0}.append(number)"),
    "array": ("array.array('d', [1, 1])", "int({0}[1])", "{0}[1] = number"),
    "bytearray": ("bytearray(3)", "{0}[1]", "{0}[1] = number"),
    "numpy": ("np.ones(3)", "int({0}[1])", "{0}[1] = number"),
    "list with attributes": ("Numbers()", "getattr({0}, 'n', 1)", "{0}.n = number", _LIST),
    "iterator": ("itertools.count(1)", "next({0})", "pass"),
    "cycle": ("itertools.cycle((1, 1, 2, 5))", "next({0})", "pass"),
    "generator": ("(n // 2 for n in range(2, 1000))", "next({0})", "pass"),
    "random": ("random.Random(7)", "{0}.randint(1, 5)", "pass"),
    "numpy generator": ("np.random.default_rng(3)", "int({0}.integers(1, 5))", "pass"),
    "context variable": ("contextvars.ContextVar('n', default=1)", "{0}.get()", "{0}.set(number)"),
    "thread local": ("threading.local()", "getattr({0}, 'n', 1)", "{0}.n = number"),
    "partial": ("functools.partial(min, [1])", "sum({0}.args[0])", "{0}.args[0][:] = [number]"),
    "weak": (
        "Weak()",
        "{0}.ref().number",
        "{0}.ref().number = number",
        _BOX
        + (
            "class Weak:\n    def __init__(self):\n        self.box = Box()\n        self.ref = weakref.ref(self.box)\n"
        ),
    ),
    "default dict": ("collections.defaultdict(int)", "{0}['a']", "{0}['a'] = number"),
    "counter": ("collections.Counter()", "{0}['a'] + 1", "{0}['a'] += number % 2"),
    "ordered": ("collections.OrderedDict(a=1)", "{0}['a']", "{0}['a'] = number"),
    "user dict": ("collections.UserDict(a=1)", "{0}['a']", "{0}['a'] = number"),
    "long list": ("[1] * 1000", "{0}[777]", "{0}[777] = number"),
    "long list of objects": ("[Box() for _ in range(300)]", "{0}[299].number", "{0}[299].number = number", _BOX),
    "deep": (
        "[[[[[[[[[Box()]]]]]]]]]",
        "{0}[0][0][0][0][0][0][0][0][0].number",
        "{0}[0][0][0][0][0][0][0][0][0].number = number",
        _BOX,
    ),
    "text": ("['a']", "len({0}[0])", "{0}[0] = 'a' * number"),
    "complex": ("[1j]", "int({0}[0].imag)", "{0}[0] = number * 1j"),
    "method": (
        "Box().get",
        "{0}()",
        "{0}.__self__.number = number",
        _BOX + "    def get(self):\n        return self.number\n",
    ),
    "callable": (
        "Box()",
        "{0}()",
        "{0}.number = number",
        _BOX + "    def __call__(self):\n        return self.number\n",
    ),
    "property": (
        "Box()",
        "{0}.doubled",
        "{0}.number = number",
        _BOX + "    @property\n    def doubled(self):\n        return 2 * self.number\n",
    ),
    "of its class": ("Box()", "{0}.shared", "Box.shared = number", _BOX + "    shared = 1\n"),
    "descriptor": (
        "Owner()",
        "{0}.n",
        "Owner.__dict__['n'].number = number",
        _BOX
        + (
            "class Field(Box):\n    def __get__(self, owner, kind=None):\n        return self.number\n"
            "class Owner:\n    n = Field()\n"
        ),
    ),
    "bool": ("[False]", "1 + {0}[0]", "{0}[0] = bool(number % 2)"),
    "module in a list": ("[nn.Linear(1, 1)]", "getattr({0}[0], 'n', 1)", "{0}[0].n = number"),
    "numpy scalar": ("[np.float32(1)]", "int({0}[0])", "{0}[0] = np.float32(number)"),
    "iterator class": (
        "Steps()",
        "next({0})",
        "pass",
        "class Steps:\n    n = 0\n    def __next__(self):\n        self.n += 1\n        return self.n // 3\n",
    ),
    "tensor, tolist": ("torch.ones(2)", "int(sum({0}.tolist()))", "{0}.fill_(number)"),
    "tensor, numpy": ("torch.ones(2)", "int({0}.numpy()[1])", "{0}.fill_(number)"),
    "tensor, array": ("torch.ones(2)", "int(np.asarray({0})[1])", "{0}.fill_(number)"),
    "tensor, dlpack": ("torch.ones(2)", "int(np.from_dlpack({0})[1])", "{0}.fill_(number)"),
    "tensor, bool": ("torch.ones(())", "(2 if {0} > 2 else 1)", "{0}.fill_(number)"),
    "tensor, int": ("torch.ones((), dtype=torch.int64)", "int({0})", "{0}.fill_(number)"),
    "tensor, index": ("torch.ones((), dtype=torch.int64)", "table[{0}]", "{0}.fill_(number)", _TABLE),
    "tensor, format": ("torch.ones((), dtype=torch.int64)", "int(format({0}))", "{0}.fill_(number)"),
    "tensor, storage": ("torch.ones(2)", "int({0}.untyped_storage().tolist()[3] // 32)", "{0}.fill_(number)"),
    "tensor of memory": ("np.ones(2, dtype='float32')", "int(torch.from_numpy({0}).sum())", "{0}[:] = number"),
}

_OTHERS = {
    "counter in forward": Kept("self.calls // 3", "", "self.calls = 0", forward="self.calls += 1"),
    "counter of a class": Kept("Block.calls // 3", "", "", "calls = 0\n", forward="Block.calls += 1"),
    "global counter": Kept("calls // 3", "", "", "calls = 0\n", forward="global calls; calls += 1"),
    "counter in a helper": Kept(
        "helper()", "", "", "calls = [0]\ndef helper():\n    calls[0] += 1\n    return calls[0] // 3\n"
    ),
    "function attribute": Kept(
        "helper()", "helper.number = number", "", "def helper():\n    return helper.number\nhelper.number = 1\n"
    ),
    "default argument": Kept(
        "helper()", "helper.__defaults__[0][0] = number", "", "def helper(numbers=[1]):\n    return numbers[0]\n"
    ),
    "default of forward": Kept("defaults[0]", "Block.forward.__defaults__[1][0] = number"),
    "python's random": Kept("random.randint(1, 5)"),
    "python's random, imported": Kept("randint(1, 5)", before="from random import randint\n"),
    "python's random, within": Kept(
        "helper()", before="def helper():\n    import random\n    return random.randint(1, 5)\n"
    ),
    "random choice": Kept("random.choice((1, 2))"),
    "numpy's random": Kept("np.random.randint(1, 5)"),
    "numpy's random, imported": Kept("randint(1, 5)", before="from numpy.random import randint\n"),
    "environment": Kept("int(os.environ.get('FUZZ', 1))", "os.environ['FUZZ'] = str(number)"),
    "getenv": Kept("int(os.getenv('FUZZ', 1))", "os.environ['FUZZ'] = str(number)"),
    "python module": Kept("settings.number", "settings.number = number", "", _SETTINGS),
    "memoised tensor": Kept(
        "1",
        "block.cache.clear()",
        "self.cache = {}",
        forward="h = h * self.cache.setdefault(h.shape, torch.full(h.shape[-1:], 1.5))",
    ),
    "forward hook": Kept(
        "1",
        "block.numbers[0] = number",
        "self.numbers = numbers = [1]\n"
        "self.fc1.register_forward_hook(lambda module, args, output: output * (1 + numbers[0]))",
    ),
    "schedule": Kept(
        "self.schedule.value()",
        "block.schedule.step = number",
        "self.schedule = Schedule()",
        "class Schedule:\n    start = 1\n    def __init__(self):\n        self.step = 0\n"
        "    def value(self):\n        return self.start + max(0, self.step - 2)\n",
    ),
    "enum": Kept(
        "self.mode.value",
        "block.mode = Mode(1 + number % 2)",
        "self.mode = Mode(1)",
        "class Mode(enum.Enum):\n    A = 1\n    B = 2\n",
    ),
    "registry": Kept(
        "registry['f']()",
        "registry['f'] = (one, two)[number % 2]",
        "",
        "def one():\n    return 1\ndef two():\n    return 2\nregistry = {'f': one}\n",
    ),
    "named by text": Kept("getattr(self, f'number{1 + 0}')", "block.number1 = number", "self.number1 = 1"),
    "item": Kept("int(x.detach().sum().abs() * 3) % 4"),
    "data by tolist": Kept("int(abs(x.detach().flatten().tolist()[0]) * 3) % 4"),
    "cached property": Kept(
        "self.held.n",
        "block.held = Lazy(number)",
        "self.held = Lazy(1)",
        "class Lazy:\n    def __init__(self, n):\n        self._n = n\n    @functools.cached_property\n"
        "    def n(self):\n        return self._n\n",
    ),
    "static method": Kept(
        "Box.get()",
        "Box.get.__defaults__[0][0] = number",
        "",
        "class Box:\n    @staticmethod\n    def get(numbers=[1]):\n        return numbers[0]\n",
    ),
    "memoised function": Kept(
        "helper(extra)", "", "", "import functools\n@functools.lru_cache\ndef helper(n):\n    return n + 1\n", "number"
    ),
    "class with a counter": Kept("Box.number", "Box.number = number", "", "class Box:\n    number = 1\n"),
    "number of a base class": Kept("self.number", "Base.number = number", "", "class Base:\n    number = 1\n"),
}

KEPT = {f"{name}, {place}": kept for name, made in _OBJECTS.items() for place, kept in _of_attribute(*made).items()}
KEPT |= _OTHERS

USES = {
    "scale": "h = h * (0.5 + 0.25 * {n})",
    "shift": "h = h - {n}",
    "branch": "h = torch.sin(h) if {n} % 2 else torch.cos(h)",
    "late branch": "h = torch.sin(h) if {n} > 2 else torch.cos(h)",
    "roll": "h = h.roll({n} % 4, -1) * self.b",
    "weights": "h = h @ (self.w if {n} % 2 else self.u)",
    "slope": "h = F.leaky_relu(h, 0.1 * {n})",
    "text": "h = F.gelu(h, approximate=('none', 'tanh')[{n} % 2])",
    "part": "h = torch.cat((h, h), -1)[..., {n} % 4 : {n} % 4 + 4].sin()",
    "diagonal": "h = h.tril({n} % 3) * self.b",
    "power": "h = torch.tanh(h) ** (1 + {n} % 3)",
    "order": "h = (h.exp() if {n} % 2 else h.sigmoid()) * (h.sigmoid() if {n} % 2 else h.exp())",
    "number of times": "for _ in range({n} % 3):\n    h = torch.sin(h)",
}
PATTERNS = (
    (1, 1, 1, 2, 2, 1),
    (1, 2, 3, 4, 5, 6),
    (1, 1, 2, 2, 3, 3),
    (1, 2, 1, 2, 1, 2),
    (2, 1, 0, 1, 2, 6),
    (1, 1, 1, 1, 1, 5),
)


@dataclass(frozen=True)
class Case:
    """A program, made anew by every `make`, and the numbers of its steps."""

    names: tuple[str, ...]
    source: str
    numbers: tuple[int, ...]

    def make(self):
        """Its namespace: `Block`, `change(block, number)` and `argument(number)`."""
        scope = {"__name__": __name__}
        exec(compile(self.source, "fuzzed", "exec", dont_inherit=True), scope)
        return scope


def case(seed):
    """The case of a seed. The first cases take every place for a number once."""
    lot = random.Random(seed)
    places, uses = list(KEPT), list(USES)
    place, use = places[seed % len(places)], lot.choice(uses)
    kept = KEPT[place]
    source = PRELUDE + kept.before + _block(kept, USES[use])
    source += f"def change(block, number):\n{textwrap.indent(kept.change or 'pass', '    ')}\n"
    source += f"def argument(number):\n    return {kept.argument}\n"
    return Case((place, use), source, lot.choice(PATTERNS))


def _block(kept, use):
    init = textwrap.indent(kept.init, " " * 8)
    body = "\n".join(
        [f"n = {kept.read}", "h = self.fc1(x)", use.format(n="n"), kept.forward, "return self.fc2(F.gelu(h))"]
    )
    declared = "global calls\n" if "global calls" in body else ""
    body = textwrap.indent(declared + body.replace("global calls; ", ""), " " * 8)
    common = "    common = common\n" if "common =" in kept.before else "    calls = 0\n"
    base = "Base, nn.Module" if "class Base" in kept.before else "nn.Module"
    return (
        f"class Block({base}):\n{common}    def __init__(self):\n        super().__init__()\n"
        "        self.fc1, self.fc2 = nn.Linear(4, 4), nn.Linear(4, 3)\n"
        "        self.w, self.u = nn.Parameter(torch.rand(4, 4)), nn.Parameter(torch.rand(4, 4))\n"
        f"        self.b = nn.Parameter(torch.rand(4))\n{init}\n"
        f"    def forward(self, x, extra=None, defaults=[1]):\n{body}\n"
    )
