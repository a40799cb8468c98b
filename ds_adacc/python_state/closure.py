"""What a block's callable can reach: modules, parameters, buffers, tensors and Python values.

A block is an `nn.Module`, a bound method of one, or any function. Megatron-style code makes a new closure at every
forward; its cells hold the modules and the range of layers.
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

from ds_adacc.python_state.content import SCALARS, contents_of, global_names, is_known_by_identity, items_of
from ds_adacc.python_state.guards import LONGEST, Guards, guarded, snapshot
from ds_adacc.python_state.held_tensors import Path, held_tensors
from ds_adacc.python_state.reading import Reading, read

_DEPTH = 3
_WHOLE = (int, float, complex, str, bytes, set, frozenset, types.NoneType, torch.dtype, torch.device)


@dataclass
class Closure:
    """What a callable can reach.

    `tensors` are those in a function's own cells; they count as arguments of the call. `plain` is all that is neither
    module nor tensor; it tells two functions with the same code apart.
    """

    modules: list[nn.Module] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    plain: list[Any] = field(default_factory=list)

    @property
    def parameters(self) -> Iterator[torch.Tensor]:
        """Without the tensors that `torch.func.functional_call` puts in their place: those count as buffers."""
        held = (parameter for module in self.modules for parameter in module.parameters())
        yield from (tensor for tensor in held if isinstance(tensor, nn.Parameter))
        yield from (tensor for tensor in self.tensors if isinstance(tensor, nn.Parameter))

    def buffers(self) -> Iterator[tuple[nn.Module, Path, torch.Tensor]]:
        """(owner, steps that lead there, tensor) of the modules' tensors that are not parameters.

        They are registered as buffers or not, lie in lists, dicts or objects, or inside parameters (`held_tensors.py`).
        """
        for module in self.submodules():
            for held in (module._parameters, module._buffers, {key: module.__dict__[key] for key in guarded(module)}):
                for name, value in held.items():
                    yield from ((module, (name, *path), tensor) for path, tensor in held_tensors(value))

    def generators(self) -> Iterator[torch.Generator]:
        """The random generators that the modules have as attributes, or that the function itself has."""
        held = (value for module in self.submodules() for value in module.__dict__.values())
        # By the type itself: to ask a class of torch's whether something is of it takes ten times as long.
        yield from (value for value in (*held, *self.plain) if type(value) is torch.Generator)

    def read(self, more: Guards, last: Reading | None) -> tuple[Reading, list[torch.Tensor]]:
        """What there is to read now, and the tensors in it: what `reading.read` returns and raises."""
        parameters = (tensor for tensor in self.tensors if isinstance(tensor, nn.Parameter))
        return read(self.modules, parameters, self.plain, more, last)

    def submodules(self) -> Iterator[nn.Module]:
        met: set[nn.Module] = set()
        return (child for module in self.modules for _, child in module.named_modules(met))


def closure_of(function: Callable[..., Any]) -> Closure:
    """What `function` reaches: its bound object, partial arguments, closure cells, defaults, globals that it reads."""
    closure = Closure()
    _collect(function, closure, _DEPTH)
    return closure


def identity(function: Callable[..., Any]) -> Hashable:
    """A key that is equal for two callables of one block: the same module, or the same code over the same cells.

    A whole number tells blocks apart, as the first of the layers that a block runs. A fraction does not: it is a factor
    that may change at every step.
    """
    closure = closure_of(function)
    inner = _code(function)
    modules = tuple(weakref.ref(module) for module in closure.modules)
    return inner, modules, tuple(float if type(value) is float else snapshot(value) for value in closure.plain)


def with_modules(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """`function`, with the modules among its arguments bound to it: they belong to the block as its own modules do."""
    given = [*args, *kwargs.values()]
    if _holds_no_module(given):
        return function
    closure = Closure()
    _collect(given, closure, 2)
    return functools.partial(function, *closure.modules) if closure.modules else function


def name_of(function: Callable[..., Any]) -> str:
    """What to call the block in messages. A partial may have a name of its own, as `update_wrapper` gives it one."""
    name = getattr(function, "__qualname__", None)
    if name is None and isinstance(function, functools.partial):
        return name_of(function.func)
    return type(function).__name__ if name is None else name


def _code(function: Any) -> Hashable:
    if isinstance(function, nn.Module):
        return None
    if isinstance(function, functools.partial):
        return _code(function.func)
    if isinstance(function, types.MethodType):
        return function.__func__.__code__ if hasattr(function.__func__, "__code__") else function.__name__
    return getattr(function, "__code__", None) or type(function)


def _collect(thing: Any, closure: Closure, depth: int) -> None:
    if type(thing) in weakref.ProxyTypes:  # once its object is gone, it raises whatever one asks of it
        closure.plain.append(thing)
    elif isinstance(thing, nn.Module):
        if not any(thing is module for module in closure.modules):
            closure.modules.append(thing)
    elif isinstance(thing, torch.Tensor):
        if not any(thing is tensor for tensor in closure.tensors):
            closure.tensors.append(thing)
    elif depth == 0 or isinstance(thing, _WHOLE):
        closure.plain.append(thing)
    elif isinstance(thing, functools.partial):
        for part in (thing.func, *thing.args, *thing.keywords.values()):
            _collect(part, closure, depth)
    elif isinstance(thing, types.MethodType):
        _collect(thing.__self__, closure, depth)
    elif isinstance(thing, types.FunctionType):
        cells = [each for cell in thing.__closure__ or () for each in contents_of(cell)]
        for part in (*cells, *_globals(thing), *(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()):
            _collect(part, closure, depth - 1)
    else:
        items = None if is_known_by_identity(thing) else items_of(thing)
        if not items or len(items) > LONGEST:
            closure.plain.append(thing)
            return
        closure.plain.append((type(thing), tuple(key for key, _ in items)))
        for _, part in items:
            _collect(part, closure, depth - 1)


def _holds_no_module(thing: Any) -> bool:
    """Whether that is plain to see, as in most calls: there are tensors, numbers, and tuples and lists of those."""
    if type(thing) is tuple or type(thing) is list:
        return all(map(_holds_no_module, thing))
    return type(thing) is torch.Tensor or type(thing) in SCALARS


def _globals(function: types.FunctionType) -> Iterator[Any]:
    """Modules, tensors and plain values that the function's own code reads as globals."""
    for name in global_names(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, nn.Module | torch.Tensor | int | float | str | list | tuple):
            yield value
