"""The arguments of operators: trees of tuples and lists, whose leaves are references to tensors, or constants."""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ds_adacc.program.geometry import Geometry


class Constant(int):
    """A whole number that an operator computes with, unlike a size, an index or a dimension."""


CONSTANTS = (float, Constant)  # the types of numbers of which each block of a type may have its own


@dataclass(frozen=True)
class ValueRef:
    """An operator's argument, or a saved tensor, that is (a view of) the value `index`."""

    index: int
    geometry: Geometry


@dataclass(frozen=True)
class ParameterRef:
    """A reference to the block's parameter `index`. The geometry starts at the parameter's first byte (Rule R5)."""

    index: int
    geometry: Geometry


_REFERENCES = (ValueRef, ParameterRef)


class Template:
    """An operator's arguments, into which tensors are put in place of the references.

    What is constant is found once: a walk through all arguments may take longer than the operator's kernel. Lists are
    made anew each time, as a Function may write to them.
    """

    __slots__ = ("_args", "_kwargs", "_named", "_placed")

    def __init__(self, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> None:
        self._args, self._kwargs = list(args), dict(kwargs)
        self._placed = tuple((place, arg) for place, arg in enumerate(args) if not _is_constant(arg))
        self._named = tuple((name, arg) for name, arg in kwargs if not _is_constant(arg))

    def filled(self, tensor_of: Callable[[ValueRef | ParameterRef], torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with `tensor_of` each reference. The dict must not be written to."""
        args, kwargs = self._args.copy(), self._kwargs
        for place, arg in self._placed:
            args[place] = tensor_of(arg) if type(arg) in _REFERENCES else _filled(arg, tensor_of)
        if self._named:
            kwargs = {**kwargs, **{name: _filled(arg, tensor_of) for name, arg in self._named}}
        return args, kwargs


def _is_constant(tree: Any) -> bool:
    kind = type(tree)
    return kind not in (*_REFERENCES, list) and (kind is not tuple or all(map(_is_constant, tree)))


def _filled(tree: Any, tensor_of: Callable[[ValueRef | ParameterRef], torch.Tensor]) -> Any:
    kind = type(tree)
    if kind in _REFERENCES:
        return tensor_of(tree)
    return kind([_filled(item, tensor_of) for item in tree]) if kind is tuple or kind is list else tree


def without_data(tree: Any, dynamic: frozenset[int]) -> Any:
    """`tree` without device numbers and addresses, and without the geometries of the values in `dynamic`."""
    if isinstance(tree, torch.device):
        return tree.type
    if isinstance(tree, torch.Generator):
        return "generator", tree.device.type
    if isinstance(tree, types.FunctionType | types.BuiltinFunctionType):  # whose text has its address
        return "function", tree.__module__, tree.__qualname__
    if isinstance(tree, ValueRef) and tree.index in dynamic:
        return "dynamic", tree.index
    if type(tree) in CONSTANTS:
        return "constant", type(tree).__name__
    if isinstance(tree, tuple | list):
        return type(tree).__name__, tuple(without_data(item, dynamic) for item in tree)
    return tree


def extract_numbers(kinds: tuple[type, ...], tree: Any, found: list[Any]) -> Hashable:
    """Append the numbers of these types in the tree to `found`; returns the tree without them."""
    of = type(tree)
    if of in kinds:
        found.append(tree)
        return of.__name__
    if of is Geometry:
        return "geometry", extract_numbers(kinds, (tree.size, tree.stride, tree.start), found), tree.dtype
    if of is ValueRef or of is ParameterRef:
        return of, tree.index, extract_numbers(kinds, tree.geometry, found)
    if isinstance(tree, tuple | list):
        return of, tuple([extract_numbers(kinds, item, found) for item in tree])
    return tree


def substitute_numbers(kinds: tuple[type, ...], tree: Any, numbers: Iterator[Any]) -> Any:
    """The tree with these numbers in place of its own of these types."""
    of = type(tree)
    if of in kinds:
        return next(numbers)
    if of is Geometry:
        size, stride, start = substitute_numbers(kinds, (tree.size, tree.stride, tree.start), numbers)
        return Geometry(size, stride, tree.dtype, start)
    if of is ValueRef or of is ParameterRef:
        return of(tree.index, substitute_numbers(kinds, tree.geometry, numbers))
    if isinstance(tree, tuple | list):
        return of([substitute_numbers(kinds, item, numbers) for item in tree])
    return tree


def references_in(tree: Any) -> Iterator[ValueRef | ParameterRef]:
    return _instances(_REFERENCES, tree)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    return _instances(torch.Tensor, tree)


def generators_in(tree: Any) -> Iterator[torch.Generator]:
    return _instances(torch.Generator, tree)


def _instances(kind: type | tuple[type, ...], tree: Any) -> Iterator[Any]:
    """The objects of this class, or of these, in nested tuples, lists and dicts, in order."""
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from _instances(kind, item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _instances(kind, item)
