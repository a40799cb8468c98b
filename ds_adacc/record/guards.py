"""What a block's program depends on besides the tensors among its arguments: flat marks, by dotted name (Rule 8).

Two calls whose marks are equal run the same program. Numbers, strings, lists, tuples, dicts and objects whose whole
state is their `__dict__` are compared by content. All else is compared by identity: submodules, functions, and objects
whose state Python does not show.
"""

from __future__ import annotations

import functools
import numbers
import types
import weakref
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import nn

Guards = dict[str, Hashable]

_MODULE_INTERNALS = frozenset(nn.Module().__dict__) - {"training"}
_DEEPSPEED = frozenset({"applied_pre_backward_ref_cnt", "pre_bwd_fn", "post_bwd_fn", "_original_parameters"})
_SCALARS = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device})
_DEPTH = 3
_ARGUMENT_DEPTH = 5  # transformers passes caches of caches of lists of layers, made anew at every forward
LONGEST = 256  # items of a container that is compared by content; a longer one would cost too much at every step


class _Plain:
    pass


class _Same(weakref.ref):
    """An object by identity: equal to a reference to the same live object, and to none once the object is gone."""

    __slots__ = ("_address",)

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._address = id(value)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        value = self()
        return value is not None and isinstance(other, _Same) and other() is value

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return self._address


class _Held:
    """The same for an object that allows no weak references. It is kept alive so that its address is not used again."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def guards_of(modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> Guards:
    """The marks of `modules`, with all that they hold, and of `parameters` from elsewhere."""
    walk = _Walk()
    for number, module in enumerate(modules):
        walk.module(f"block{number or ''}", module)
    for number, parameter in enumerate(parameters):
        walk.guards[f"parameter{number}"] = _parameter(parameter)
    return walk.guards


def snapshot(value: Any) -> Hashable:
    """A hashable key that is equal for two values with which a block runs the same program."""
    if type(value) in _SCALARS:
        return type(value), value
    walk = _Walk()
    walk.value("", value, _ARGUMENT_DEPTH)
    return tuple(walk.guards.items())


def moved(before: Guards, after: Guards) -> set[str] | None:
    """The numbers that differ, by name; None if anything else does."""
    if before.keys() != after.keys():
        return None
    names = {name for name, mark in after.items() if mark != before[name]}
    return names if all(_is_number(before[name]) and _is_number(after[name]) for name in names) else None


def is_plain(value: Any) -> bool:
    """Whether `value` is an object of a Python class whose whole state is its `__dict__`."""
    return type(value).__basicsize__ == _Plain.__basicsize__ and isinstance(getattr(value, "__dict__", None), dict)


class _Walk:
    """Collects marks. An object met a second time gets the name of the first meeting as its mark: so cycles end."""

    def __init__(self) -> None:
        self.guards: Guards = {}
        self._seen: dict[int, str] = {}

    def module(self, name: str, module: nn.Module) -> None:
        if self._met(name, module):
            return
        guards = self.guards
        hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
        guards[name] = _token(module), type(module), tuple([tuple(h) for h in hooks])
        for key, parameter in module._parameters.items():
            guards[f"{name}.{key}"] = None if parameter is None else _parameter(parameter)
        for key, buffer in module._buffers.items():
            self.value(f"{name}.{key}", buffer, 0)
        for key, value in module.__dict__.items():
            if key not in _MODULE_INTERNALS and key not in _DEEPSPEED and not key.startswith("ds_"):
                self.value(f"{name}.{key}", value, _DEPTH)
        for key, child in module._modules.items():
            if child is None:
                guards[f"{name}.{key}"] = None
            else:
                self.module(f"{name}.{key}", child)

    def value(self, name: str, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in _SCALARS or isinstance(value, int | float | str | bytes | range | numbers.Number):
            self.guards[name] = kind, value
        elif isinstance(value, torch.Tensor):
            self.guards[name] = _parameter(value) if isinstance(value, nn.Parameter) else _look(value)
        elif kind is types.MethodType:
            self.guards[name] = _token(value.__self__), _token(value.__func__)
        elif not self._met(name, value):
            items = None if depth == 0 or isinstance(value, nn.Module) else _items(value)
            if items is None or len(items) > LONGEST:
                self.guards[name] = _token(value)
                return
            self.guards[name] = kind, len(items)
            for key, item in items:
                self.value(f"{name}.{key}" if type(key) is str else f"{name}[{key!r}]", item, depth - 1)

    def _met(self, name: str, value: Any) -> bool:
        first = self._seen.setdefault(id(value), name)
        if first is not name:
            self.guards[name] = "same", first
        return first is not name


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if isinstance(value, slice):
        return [("start", value.start), ("stop", value.stop), ("step", value.step)]
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    return list(value.__dict__.items()) if is_plain(value) else None


def _token(value: Any) -> Hashable:
    """A mark that is equal for the same object only."""
    try:
        return _Same(value)
    except TypeError:
        return _Held(value)


def _parameter(parameter: torch.Tensor) -> Hashable:
    """Without the shape: under ZeRO-3 that is the shape of a partition, or empty."""
    return _token(parameter), parameter.requires_grad, parameter.dtype


def _look(tensor: torch.Tensor) -> Hashable:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return _token(tensor)
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _is_number(mark: Hashable) -> bool:
    return isinstance(mark, tuple) and mark[0] in (int, float)
