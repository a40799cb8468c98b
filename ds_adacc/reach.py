"""What a block's callable can reach: its modules, parameters, buffers, tensors and Python numbers.

A block is an `nn.Module`, a bound method of one, or any function: Megatron-style code passes closures made anew at
every forward, whose cells hold the modules and the layer range.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

_MODULE_INTERNALS = frozenset(nn.Module().__dict__) - {"training"}
_DEPTH = 3
_LONGEST = 256


@dataclass
class Reach:
    """What was found. `tensors` are those a function's own cells hold: they count as arguments of the call."""

    modules: list[nn.Module] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    plain: list[Any] = field(default_factory=list)

    @property
    def parameters(self) -> Iterator[torch.Tensor]:
        for module in self.modules:
            yield from module.parameters()
        yield from (tensor for tensor in self.tensors if isinstance(tensor, nn.Parameter))

    def buffers(self) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
        """Tensors that the modules hold besides parameters, registered as buffers or not."""
        for module in self._submodules():
            names = [*module._buffers, *(n for n in module.__dict__ if n not in _MODULE_INTERNALS)]
            for name in names:
                value = getattr(module, name, None)
                if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                    yield module, name, value

    def numbers(self) -> Iterator[Guard]:
        """Every Python number and string that the modules, their configuration objects and lists hold."""
        seen: set[int] = set()
        for module in self._submodules():
            for name, value in module.__dict__.items():
                if name not in _MODULE_INTERNALS and not name.startswith("ds_"):
                    yield from _numbers(module.__dict__, name, value, type(module).__name__, seen, _DEPTH)

    def _submodules(self) -> Iterator[nn.Module]:
        seen: set[int] = set()
        for module in self.modules:
            for child in module.modules():
                if id(child) not in seen:
                    seen.add(id(child))
                    yield child


@dataclass(frozen=True)
class Guard:
    """A number or string that stood at `holder[key]` when the block was recorded."""

    holder: Any = field(repr=False)
    key: Any
    value: Any
    path: str

    def holds(self) -> bool:
        try:
            now = self.holder[self.key]
        except (KeyError, IndexError):
            return False
        return now is self.value or (type(now) is type(self.value) and now == self.value)


def reach(function: Callable[..., Any]) -> Reach:
    """What `function` holds in itself: bound object, partial arguments, closure cells, defaults."""
    found = Reach()
    _collect(function, found, _DEPTH)
    return found


def identity(function: Callable[..., Any]) -> Hashable:
    """Equal for two callables that are the same block: same module, or same code over the same cells."""
    found = reach(function)
    inner = _code(function)
    modules = tuple(weakref.ref(module) for module in found.modules)
    return inner, modules, tuple(snapshot(value) for value in found.plain)


def snapshot(value: Any) -> Hashable:
    """A non-tensor's worth as part of a key: itself if it is a number or the like, else its type and numbers."""
    if isinstance(value, int | float | bool | str | bytes | type(None) | torch.dtype | torch.device):
        return (type(value), value)
    return type(value), tuple((g.path, g.value) for g in _numbers({}, "", value, "", set(), _DEPTH))


def _code(function: Any) -> Hashable:
    if isinstance(function, nn.Module):
        return None
    if isinstance(function, functools.partial):
        return _code(function.func)
    if isinstance(function, types.MethodType):
        return function.__func__.__code__ if hasattr(function.__func__, "__code__") else function.__name__
    return getattr(function, "__code__", None) or type(function)


def _collect(thing: Any, found: Reach, depth: int) -> None:
    if isinstance(thing, nn.Module):
        if not any(thing is module for module in found.modules):
            found.modules.append(thing)
    elif isinstance(thing, torch.Tensor):
        if not any(thing is tensor for tensor in found.tensors):
            found.tensors.append(thing)
    elif depth == 0:
        return
    elif isinstance(thing, functools.partial):
        for part in (thing.func, *thing.args, *thing.keywords.values()):
            _collect(part, found, depth)
    elif isinstance(thing, types.MethodType):
        _collect(thing.__self__, found, depth)
    elif isinstance(thing, types.FunctionType):
        cells = [cell.cell_contents for cell in thing.__closure__ or () if _filled(cell)]
        for part in (*cells, *(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()):
            _collect(part, found, depth - 1)
    elif isinstance(thing, list | tuple) and len(thing) <= _LONGEST:
        for part in thing:
            _collect(part, found, depth - 1)
    elif isinstance(thing, dict) and len(thing) <= _LONGEST:
        for part in thing.values():
            _collect(part, found, depth - 1)
    else:
        found.plain.append(thing)


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a cell that its function has not assigned yet
        return False


def _numbers(holder: Any, key: Any, value: Any, path: str, seen: set[int], depth: int) -> Iterator[Guard]:
    path = f"{path}.{key}"
    if isinstance(value, bool | int | float | str):
        yield Guard(holder, key, value, path)
        return
    if depth == 0 or id(value) in seen or isinstance(value, torch.Tensor | nn.Module | type | types.ModuleType):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        items: Any = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    else:
        value = getattr(value, "__dict__", {})
        items = list(value.items()) if isinstance(value, dict) else []
    if len(items) <= _LONGEST:
        for name, item in items:
            yield from _numbers(value, name, item, path, seen, depth - 1)
