"""Functions, and what else is found in a class: what of it may change."""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable, Iterator
from typing import Any

from torch.autograd.function import BackwardCFunction

from ds_adacc.python_state.content import SCALARS, contents_of, mark_of_number
from ds_adacc.python_state.covered import covered_by
from ds_adacc.python_state.libraries import is_library

_DECORATORS = frozenset({"functools"})  # a cached_property or a partialmethod holds a function


def mark_of_function(function: types.FunctionType) -> Hashable | None:
    """The mark of a function that holds nothing but its code and plain defaults; None if it holds more.

    Codes are equal if they do the same. The globals with which they do it may be others, as where a file runs twice;
    they are told by their address, which is not used again as long as a block reads any of them.
    """
    code, defaults, named = function.__code__, function.__defaults__, function.__kwdefaults__
    mark = code, id(function.__globals__)
    is_closed = function.__closure__ is None or code.co_freevars == ("__class__",)  # what super() needs
    if not is_closed or function.__dict__:
        return None
    if defaults is None and named is None:
        return mark
    values = (*(defaults or ()), *(named or {}).values())
    if not SCALARS.issuperset(map(type, values)):
        return None
    return *mark, tuple(map(mark_of_number, values)), tuple(named or ())


def state_in(attribute: Any) -> Any | None:
    """What may change in an attribute of a class, such as the function of a property."""
    if type(attribute) is types.FunctionType:
        return attribute
    if isinstance(attribute, property):
        return attribute.fget
    if isinstance(attribute, staticmethod | classmethod):
        return attribute.__func__
    kind = type(attribute)
    if isinstance(attribute, types.MethodType) or kind.__module__ in _DECORATORS:
        return attribute
    is_descriptor = hasattr(kind, "__get__") and is_library(kind.__module__)
    is_of_function = isinstance(attribute, type) and issubclass(attribute, BackwardCFunction)  # torch has made it
    return None if is_descriptor or is_of_function else attribute


def wrapped_in(function: Any) -> list[types.FunctionType]:
    """The user's functions that a library's decorator has made this function of."""
    found: list[types.FunctionType] = []
    met, waiting = {id(function)}, [function]
    for each in waiting:  # it grows
        for held in _held_by(each):
            inner = held.__func__ if isinstance(held, types.MethodType) else held
            if id(inner) in met or not isinstance(inner, types.FunctionType | functools._lru_cache_wrapper):
                continue
            met.add(id(inner))
            if isinstance(inner, types.FunctionType) and not is_library(inner.__globals__.get("__name__")):
                found.append(inner)
            else:
                waiting.append(inner)
    return found


def _held_by(function: Any) -> Iterator[Any]:
    covered = covered_by(function)
    if covered is not None and covered.is_of(function):
        yield covered.own  # that of the block's class is read there
        return
    for cell in getattr(function, "__closure__", None) or ():
        yield from contents_of(cell)
    if function.__dict__:
        yield function.__dict__.get("__wrapped__")
        registry = function.__dict__.get("registry")  # of functools.singledispatch
        yield from registry.values() if isinstance(registry, types.MappingProxyType) else ()
