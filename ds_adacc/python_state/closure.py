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
from itertools import chain
from typing import Any

import torch
from torch import nn

from ds_adacc.python_state.codes import global_names
from ds_adacc.python_state.content import SCALARS, contents_of, is_known_by_identity, items_of
from ds_adacc.python_state.guards import LONGEST, Guards, guarded, snapshot
from ds_adacc.python_state.held_tensors import Path, held_tensors
from ds_adacc.python_state.reading import Reading, UnreadableModule, read

_DEPTH = 3
_RUNS = (nn.Module, torch.Tensor, types.FunctionType, types.MethodType, functools.partial)
_WHOLE = (int, float, complex, str, bytes, set, frozenset, types.NoneType, torch.dtype, torch.device)


@dataclass
class Closure:
    """What a callable can reach.

    `tensors` are those in a function's own cells; they count as arguments of the call. `plain` is all that is neither
    module nor tensor. `arrangement` tells how all of it is put together: for each thing that was met, in order, which
    function, method or partial it is, or which of the modules or tensors; None for what is in `plain`. `attributes`:
    those of the functions and partials, such as a count of calls. They are guarded, and tell no blocks apart.
    """

    modules: list[nn.Module] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    plain: list[Any] = field(default_factory=list)
    arrangement: list[Hashable] = field(default_factory=list)
    attributes: list[dict[str, Any]] = field(default_factory=list)

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
        return read(self.modules, parameters, [*self.plain, *self.attributes], more, last)

    def marks(self) -> Guards:
        """The marks of what there is now; none if a module cannot be read, which the forward has just made."""
        try:
            return self.read({}, last=None)[0].marks
        except UnreadableModule:
            return {}

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

    Functions in the cells are told by their code, too, and methods by their function: each may be the one that runs.

    A whole number tells blocks apart, as the first of the layers that a block runs. A fraction does not: it is a factor
    that may change at every step.
    """
    closure = closure_of(function)
    modules = tuple(weakref.ref(module) for module in closure.modules)
    plain = tuple(float if type(value) is float else snapshot(value) for value in closure.plain)
    return tuple(closure.arrangement), modules, plain


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


def _collect(thing: Any, closure: Closure, depth: int) -> None:
    if type(thing) in weakref.ProxyTypes:  # once its object is gone, it raises whatever one asks of it
        _collect_plain(thing, closure)
    elif isinstance(thing, nn.Module):
        closure.arrangement.append(("module", _place(thing, closure.modules)))
    elif isinstance(thing, torch.Tensor):
        closure.arrangement.append(("tensor", _place(thing, closure.tensors)))
    elif depth == 0 or isinstance(thing, _WHOLE):
        _collect_plain(thing, closure)
    elif isinstance(thing, functools.partial):
        closure.arrangement.append(("partial", len(thing.args), *thing.keywords))
        closure.attributes += [vars(thing)] if vars(thing) else []
        for part in (thing.func, *thing.args, *thing.keywords.values()):
            _collect(part, closure, depth)
    elif isinstance(thing, types.MethodType):
        closure.arrangement.append("method")
        _collect(thing.__self__, closure, depth)
        if isinstance(thing.__func__, types.FunctionType):
            _collect_function(thing.__func__, closure, depth, is_method=True)
        else:
            _collect(thing.__func__, closure, depth)
    elif isinstance(thing, types.FunctionType):
        _collect_function(thing, closure, depth)
    else:
        items = None if is_known_by_identity(thing) else items_of(thing)
        if not items or len(items) > LONGEST:
            _collect_plain(thing, closure)
            return
        _collect_plain((type(thing), tuple(key for key, _ in items)), closure)
        for _, part in items:
            _collect(part, closure, depth - 1)


def _collect_function(function: types.FunctionType, closure: Closure, depth: int, is_method: bool = False) -> None:
    """Of a method, the class that `super()` needs is left out, and its globals are: those are seen when it runs."""
    code = function.__code__
    pairs = zip(code.co_freevars, function.__closure__ or (), strict=True)
    cells = [contents_of(cell) for name, cell in pairs if not (is_method and name == "__class__")]
    closure.arrangement.append((code, id(function.__globals__), *map(len, cells)))  # as of `mark_of_function`
    closure.attributes += [function.__dict__] if function.__dict__ else []
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    if is_method:  # what its decorators count, say, is guarded, and does not tell blocks apart
        parts = (*chain.from_iterable(cells), *defaults)
        closure.attributes += [{"": part} for part in parts if type(part) in SCALARS]
        parts = tuple(part for part in parts if isinstance(part, _RUNS))
    else:
        parts = (*chain.from_iterable(cells), *_globals(function), *defaults)
    for part in parts:
        _collect(part, closure, depth - 1)


def _collect_plain(thing: Any, closure: Closure) -> None:
    closure.arrangement.append(None)
    closure.plain.append(thing)


def _place(thing: Any, met: list[Any]) -> int:
    """Its place among those that were met, the last one if it is new."""
    place = next((n for n, each in enumerate(met) if each is thing), len(met))
    if place == len(met):
        met.append(thing)
    return place


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
