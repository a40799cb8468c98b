"""What a recording of one block consists of: values, operators, and the positions autograd saves."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ds_adacc.record.geometry import Geometry

COLLECTIVE = "a collective"  # the refusal of an operator that other ranks take part in
COMPILED = "runs compiled"  # the refusal of an operator inside of compiled code


@dataclass(frozen=True)
class ValueRef:
    """An operator's argument, or a saved tensor, that is (a view of) the value `index`."""

    index: int
    geometry: Geometry


@dataclass(frozen=True)
class ParameterRef:
    """The same for the block's parameter `index`; the geometry is relative to the parameter's first byte."""

    index: int
    geometry: Geometry


@dataclass(frozen=True)
class Value:
    """One storage's content at one time; views of it are geometries, in-place writes make a new value.

    `origin` is "made" (by an operator of the block), "input" (an argument), "buffer" (a tensor held by the
    block's modules) or "captured" (from elsewhere). `channels` is the length of its last dimension as the
    operators that read it see it. `requires_grad` matters for inputs: what needs no gradient stays with the caller.
    `device` is the type of the device it lies on. `is_parameter`: an argument that is an `nn.Parameter`.
    `label` is what the user would call it (labels.py); `name` is made of ATen's operators.
    """

    index: int
    name: str
    origin: str
    geometry: Geometry
    producer: int | None = None
    output: int = 0
    source: int = 0
    channels: int = 1
    requires_grad: bool = False
    overwritten: bool = False
    dynamic: bool = False
    two_valued: bool = False
    finite: bool = True
    role: str = "other"
    device: str = "cpu"
    is_parameter: bool = False
    label: str = ""

    @property
    def nbytes(self) -> int:
        return self.geometry.span

    @property
    def owned(self) -> bool:
        """Whether the block is what keeps this value alive: a constant or a mask stays with the caller."""
        return self.origin == "made" or (self.origin == "input" and self.requires_grad)


@dataclass(frozen=True)
class Op:
    """One ATen call. Tensors in `args` and `kwargs` are references; all else is a constant of the program."""

    index: int
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[int | None, ...]
    refusal: str | None = None

    @property
    def name(self) -> str:
        return str(self.func)

    @property
    def short_name(self) -> str:
        return self.name.split(".")[1] if "." in self.name else self.name

    @property
    def replayable(self) -> bool:
        return self.refusal is None

    @property
    def is_collective(self) -> bool:
        return self.refusal == COLLECTIVE

    @property
    def references(self) -> Iterator[ValueRef | ParameterRef]:
        yield from _references((self.args, tuple(value for _, value in self.kwargs)))

    @property
    def reads(self) -> tuple[int, ...]:
        """Indices of the values it reads, each once, in order of first use."""
        return tuple(dict.fromkeys(ref.index for ref in self.references if isinstance(ref, ValueRef)))


@dataclass(frozen=True)
class Position:
    """One call of the pack hook: what it saves, and how many operators had run by then.

    `ref` is None where the tensor cannot be planned for (a conjugate view, say): it is retained as it comes.
    `fresh`: not even a view was taken since the last operator, so it may be that operator saving its own output.
    """

    ref: ValueRef | ParameterRef | None
    ops_done: int
    fresh: bool


@dataclass(frozen=True)
class Recording:
    """One block's program, free of tensors but for its parameters and the owners of its buffers."""

    name: str
    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    positions: tuple[Position, ...]
    parameters: tuple[torch.Tensor, ...] = field(repr=False)
    buffers: tuple[tuple[Any, str], ...] = field(repr=False)

    @functools.cached_property
    def digest(self) -> str:
        """Identity of the program's structure: blocks with the same one share a profile and a policy.

        It leaves out what differs from rank to rank: device numbers, and what the data decides.
        """
        dynamic = frozenset(value.index for value in self.values if value.dynamic)
        values = [_structure(value) for value in self.values]
        ops = [_without_data(_portable(op), dynamic) for op in self.ops]
        positions = [(_without_data(p.ref, dynamic), p.ops_done, p.fresh) for p in self.positions]
        text = repr((values, ops, positions))
        shapes = [(tuple(getattr(p, "ds_shape", p.shape)), p.dtype) for p in self.parameters]
        return hashlib.sha256(f"{text}{shapes}".encode()).hexdigest()[:16]

    @functools.cached_property
    def runs_compiled(self) -> bool:
        """Whether compiled code runs in the block."""
        return any(op.refusal == COMPILED for op in self.ops)

    @property
    def saved(self) -> frozenset[int]:
        """Values that autograd saves."""
        return frozenset(p.ref.index for p in self.positions if isinstance(p.ref, ValueRef))

    def refuse(self, reasons: dict[int, str]) -> Recording:
        """This recording with the operators `reasons` marked as not replayable."""
        ops = (replace(op, refusal=op.refusal or reasons.get(op.index)) for op in self.ops)
        return replace(self, ops=tuple(ops))


def _references(tree: Any) -> Iterator[ValueRef | ParameterRef]:
    if isinstance(tree, ValueRef | ParameterRef):
        yield tree
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from _references(item)


def _portable(op: Op) -> tuple[Any, ...]:
    return (op.name, op.args, op.kwargs, op.outputs, op.refusal)


def _structure(value: Value) -> tuple[Any, ...]:
    """The role is left out too: it follows from the program, but for a mask's, which its data tells.

    So is the label: blocks that differ in nothing but their modules' names are of one type.
    """
    layout = None if value.dynamic else (value.geometry, value.channels)
    flags = value.requires_grad, value.overwritten, value.dynamic
    return value.index, value.name, value.origin, layout, value.producer, value.output, value.source, flags


def _without_data(tree: Any, dynamic: frozenset[int]) -> Any:
    """`tree` without device numbers and without the geometries of the values `dynamic`."""
    if isinstance(tree, torch.device):
        return tree.type
    if isinstance(tree, ValueRef) and tree.index in dynamic:
        return "dynamic", tree.index
    if isinstance(tree, tuple | list):
        return type(tree).__name__, tuple(_without_data(item, dynamic) for item in tree)
    return tree
