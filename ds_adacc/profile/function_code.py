"""A hash of the code that an `autograd.Function` runs: a measurement of its calls is one of that code (Rule P7)."""

from __future__ import annotations

import hashlib
import inspect
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ds_adacc.python_state.codes import global_names
from ds_adacc.python_state.content import SCALARS
from ds_adacc.python_state.libraries import TRUSTED, is_library

_METHODS = ("forward", "setup_context", "backward")


def digest_of(functions: Iterable[type[torch.autograd.Function]]) -> str:
    """A SHA-256, in hexadecimal, of these Functions' code, the same in each process.

    That is the bytecode of their methods and of the Python functions and kernels of Triton that these call by a global
    name, in the Function's own package and in what is not installed; and the plain numbers that they read so. What is
    called by an attribute, as in `module.function`, is not followed, and neither is torch, whose version tells.
    """
    hashed = hashlib.sha256()
    for cls in functions:
        for part in _of_class(cls):
            hashed.update(repr(part).encode())
    return hashed.hexdigest()


def _of_class(cls: type[torch.autograd.Function]) -> Iterator[object]:
    package = _package(cls.__module__)
    waiting = [] if package in TRUSTED else [_plain(getattr(cls, name, None)) for name in _METHODS]
    met: set[Any] = set()
    while waiting:
        function = waiting.pop()
        if function is None or function in met:
            continue
        met.add(function)
        yield _of_code(function.__code__)
        for name in global_names(function.__code__):
            value = function.__globals__.get(name)
            if type(value) in SCALARS:
                yield name, repr(value)
            called = _plain(value)
            if called is not None and (_package(called.__module__) == package or not is_library(called.__module__)):
                waiting.append(called)


def _plain(called: Any) -> types.FunctionType | None:
    """The Python function that decorators have wrapped, or of which Triton makes a kernel; None if there is none."""
    while type(called).__module__.partition(".")[0] == "triton" and hasattr(called, "fn"):
        called = called.fn
    if isinstance(called, types.FunctionType):
        called = inspect.unwrap(called)
    return called if isinstance(called, types.FunctionType) else None


def _of_code(code: types.CodeType) -> tuple[object, ...]:
    """The code without the place of its source. Sets are sorted: their order differs between processes."""
    return code.co_code, code.co_names, [_of_constant(constant) for constant in code.co_consts]


def _of_constant(constant: Any) -> object:
    if isinstance(constant, types.CodeType):
        return _of_code(constant)
    return sorted(map(repr, constant)) if isinstance(constant, frozenset) else repr(constant)


def _package(module: str | None) -> str:
    return (module or "__main__").partition(".")[0]
