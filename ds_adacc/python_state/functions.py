"""Functions, and what else is found in a class: what of it may change."""

from __future__ import annotations

import types
from collections.abc import Hashable
from typing import Any

from torch.autograd.function import BackwardCFunction

from ds_adacc.python_state.content import SCALARS, is_library

_DECORATORS = frozenset({"functools"})  # a cached_property or a partialmethod holds a function


def mark_of_function(function: types.FunctionType) -> Hashable | None:
    """The mark of a function that holds nothing but its code and plain defaults; None if it holds more."""
    code, defaults, named = function.__code__, function.__defaults__, function.__kwdefaults__
    is_closed = function.__closure__ is None or code.co_freevars == ("__class__",)  # what super() needs
    if not is_closed or function.__dict__:
        return None
    if defaults is None and named is None:
        return code
    values = (*(defaults or ()), *(named or {}).values())
    kinds = tuple(map(type, values))
    return (code, values, kinds, tuple(named or ())) if SCALARS.issuperset(kinds) else None


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
