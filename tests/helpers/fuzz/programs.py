"""Random blocks: programs of common operators, written line by line and run as they are written."""

from __future__ import annotations

import random
import textwrap
from collections import Counter
from dataclasses import dataclass

import torch
from fuzz.operators import EXPRESSIONS, NAMESPACE, STATEMENTS, Skip
from torch import nn

_LEAST, _MOST = 3, 14
_LARGEST = 2000  # elements of a tensor


@dataclass(frozen=True)
class Input:
    """One argument: its shape, dtype, whether it has a gradient, and the way it is made of a leaf."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    gradient: bool = False
    made: str = "leaf"

    def make(self, generator):
        """(leaf, argument)."""
        if self.dtype is torch.int64:
            leaf = torch.randint(0, 5, self.shape, generator=generator)
        else:
            leaf = torch.randn(self.shape, generator=generator)
            leaf = leaf > 0 if self.dtype is torch.bool else leaf.to(self.dtype)
        leaf.requires_grad_(self.gradient)
        forms = {
            "leaf": lambda: leaf,
            "computed": lambda: leaf * 1,
            "transposed": lambda: (leaf * 1).transpose(0, -1).contiguous().transpose(0, -1),
            "part": lambda: torch.cat((leaf, leaf), -1)[..., : self.shape[-1]],
            "same": lambda: leaf,
        }
        return leaf, forms[self.made]()


@dataclass
class Program:
    """A block, what it is called with, and its source."""

    seed: int
    block: nn.Module
    inputs: tuple[Input, ...]
    source: str
    features: Counter[str]

    def arguments(self, seed):
        """(leaves, arguments), seeded; "same" is the argument before once more, "half" parts of one tensor."""
        generator = torch.Generator().manual_seed(seed)
        leaves, arguments = [], []
        for spec in self.inputs:
            leaf, argument = spec.make(generator)
            if spec.made == "same" and arguments:
                leaf, argument = leaves[-1], arguments[-1]
            leaves.append(leaf)
            arguments.append(argument)
        return leaves, arguments

    def __str__(self):
        parameters = "\n".join(
            f"# self.{name}: {p.dtype} {tuple(p.shape)}{'' if p.requires_grad else ' frozen'}"
            for name, p in self.block.named_parameters()
        )
        inputs = "\n".join(f"# x{i}: {spec}" for i, spec in enumerate(self.inputs))
        return f"seed {self.seed}\n{inputs}\n{parameters}\n{self.source}"


class Writer:
    """Writes a block: `w[name]` is the tensor of that name, `lot` decides."""

    def __init__(self, seed):
        self.lot = random.Random(seed)
        self.block = nn.Module()
        self.features = Counter()
        self.lines = []
        self._tensors = {}
        self._number = 0
        torch.default_generator.manual_seed(seed)

    def __getitem__(self, name):
        return self._tensors[name]

    def pick(self, *tests):
        """A tensor's name, a late one rather than an early one. Raises Skip if none passes the tests."""
        names = [name for name, t in self._tensors.items() if all(test(t) for test in tests)]
        if not names:
            raise Skip
        return names[max(self.lot.randrange(len(names)) for _ in range(2))]

    def alike(self, name):
        """A tensor of the same shape, and of the same dtype."""
        shape, dtype = self[name].shape, self[name].dtype
        return self.lot.choice([n for n, t in self._tensors.items() if t.shape == shape and t.dtype == dtype])

    def new_name(self):
        self._number += 1
        return f"v{self._number}"

    def parameter(self, *shape, like=None):
        dtype = torch.float32 if like is None else like.dtype
        known = [n for n, p in self.block.named_parameters() if p.shape == shape and p.dtype == dtype]
        if known and self.lot.random() < 0.4:
            self.features["tied"] += 1
            return f"self.{self.lot.choice(known)}"
        parameter = nn.Parameter((torch.randn(shape) * 0.5).to(dtype))
        if self.lot.random() < 0.15:
            self.features["frozen"] += 1
            parameter.requires_grad_(False)
        name = f"p{len(self.block._parameters)}"
        self.block.register_parameter(name, parameter)
        return f"self.{name}"

    def buffer(self, *shape):
        name = f"b{len(self.block._buffers)}"
        self.block.register_buffer(name, torch.randn(shape))
        return f"self.{name}"

    def module(self, module):
        name = f"m{len(self.block._modules)}"
        self.block.add_module(name, module)
        return f"self.{name}"

    def given(self, tensors):
        for number, tensor in enumerate(tensors):
            self._tensors[f"x{number}"] = tensor

    def run(self, line):
        """Run the line and keep it. Raises whatever it raises."""
        scope = {**NAMESPACE, **self._tensors, "self": self.block}
        exec(line, scope)
        made = {n: t for n, t in scope.items() if n[0] in "vx" and n[1:].isdigit() and isinstance(t, torch.Tensor)}
        if any(t.numel() > _LARGEST or t.is_complex() for t in made.values()):
            raise Skip
        self._tensors = made
        self.lines.append(line)

    def write(self):
        """Add a line by a template drawn by lot, if one suits."""
        templates = STATEMENTS if self.lot.random() < 0.14 else EXPRESSIONS
        name = self.lot.choice(list(templates))
        try:
            text = templates[name](self)
            self.run(text if name in STATEMENTS else self._assigned(text))
        except (Skip, RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            return
        self.features[name] += 1

    def _assigned(self, text):
        result = eval(text, {**NAMESPACE, **self._tensors, "self": self.block})
        if isinstance(result, torch.Tensor):
            return f"{self.new_name()} = {text}"
        if not isinstance(result, tuple | list):
            raise Skip
        return f"{', '.join(self.new_name() for _ in result)}, = {text}"

    def join(self):
        """Let the result depend on several branches."""
        names = [name for name, t in self._tensors.items() if t.requires_grad]
        chosen = dict.fromkeys(self.lot.choices(names, k=5)) if names else ()
        terms = [f"{name}.double().sum()" for name in chosen]
        self.run(f"{self.new_name()} = {' + '.join(terms) or 'torch.ones(())'}")

    def returned(self):
        """What the block returns: the last tensor and others, bare, in a tuple or a dict, beside what is no tensor."""
        names = list(self._tensors)
        chosen = dict.fromkeys([names[-1], *self.lot.choices(names, k=self.lot.randint(0, 2)), self.pick(_graded)])
        form = self.lot.choice(["one", "tuple", "dict", "others"])
        self.features[f"returns {form}"] += 1
        if form == "one":
            return self.pick(_graded)
        if form == "dict":
            return "{" + ", ".join(f"'{n}': {n}" for n in chosen) + "}"
        others = " None, 3, (True, 'text')," if form == "others" else ""
        return f"({', '.join(chosen)},{others})"


def _graded(tensor):
    return tensor.requires_grad


def generate(seed):
    """The program of a seed: the first of its attempts that returns something with a gradient."""
    for attempt in range(100):
        try:
            return _generate(seed, seed * 100 + attempt)
        except (Skip, RuntimeError):  # some views cannot be read any more once their base has been written to
            continue
    raise AssertionError(f"no program for seed {seed}")


def _generate(seed, draw):
    writer = Writer(draw)
    inputs = _inputs(writer.lot)
    program = Program(seed, writer.block, inputs, "", writer.features)
    writer.given(program.arguments(draw)[1])
    for _ in range(writer.lot.randint(_LEAST, _MOST)):
        writer.write()
    if len(writer.lines) < 2:
        raise Skip
    if writer.lot.random() < 0.7:
        writer.join()
    returned = writer.returned()
    names = ", ".join(f"x{i}" for i in range(len(inputs)))
    body = textwrap.indent("\n".join([*writer.lines, f"return {returned}"]), "    ")
    program.source = f"def forward(self, {names}):\n{body}\n"
    scope = dict(NAMESPACE)
    exec(program.source, scope)
    writer.block.__class__ = type(f"Fuzz{seed}", (nn.Module,), {"forward": scope["forward"]})
    if writer.lot.random() < 0.1:
        writer.parameter(3, 3)
        writer.features["unused parameter"] += 1
    writer.features.update(spec.made for spec in inputs)
    return program


def _inputs(lot):
    shape = (lot.choice([1, 2, 2, 3]), lot.choice([1, 2, 3, 5]), lot.choice([1, 4, 8, 8, 16]))
    if lot.random() < 0.03:
        shape = (0, *shape[1:])
    if lot.random() < 0.05:
        shape = (1, 1, 1)
    form = lot.choice(["leaf", "leaf", "computed", "computed", "transposed", "part"])
    dtype = lot.choice([torch.float32] * 6 + [torch.float64, torch.bfloat16])
    inputs = [Input(shape, dtype, lot.random() < 0.9, form)]
    if lot.random() < 0.4:
        inputs.append(Input(shape, dtype, lot.random() < 0.5, lot.choice(["leaf", "computed", "same"])))
    if lot.random() < 0.4:
        inputs.append(Input(lot.choice([shape[:1], (3,), (2, 2)]), torch.int64))
    if lot.random() < 0.3:
        inputs.append(Input(shape, torch.bool))
    if lot.random() < 0.3:
        inputs.append(Input(shape[-1:], dtype, lot.random() < 0.5))
    return tuple(inputs)
