"""Results that a function of the user's has kept, as `functools.lru_cache` does: were some used while recording?

Such a result was computed before, perhaps of globals that have changed since, and no watch has seen of which.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Hashable, Mapping
from typing import Any

from ds_adacc.python_state.content import global_names, imports, is_library
from ds_adacc.python_state.function_marks import mark_of_function


class KeptResults:
    """The mark of a function of the user's that keeps its results. It is equal to any other one."""

    def __init__(self, function: functools._lru_cache_wrapper[Any], computes: types.FunctionType) -> None:
        self._function = weakref.ref(function)
        self._hits = function.cache_info().hits
        self._computes = weakref.ref(computes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeptResults)

    def __hash__(self) -> int:
        return 0

    @property
    def code(self) -> types.CodeType | None:
        """The code that computes the results."""
        computes = self._computes()
        return None if computes is None else computes.__code__

    def used_since(self) -> types.CodeType | None:
        """The code that has computed a result which was taken since, if it reads anything of the user's; else None.

        None too if the function's result is declared constant, as `torch.compiler.assume_constant_result` does.
        """
        function, computes = self._function(), self._computes()
        if function is None or computes is None or function.cache_info().hits <= self._hits:
            return None
        if getattr(function, "_dynamo_marked_constant", False):
            return None
        return computes.__code__ if _reads_more(computes) else None


def _reads_more(function: types.FunctionType) -> bool:
    """Whether the function reads anything besides its arguments and libraries, as far as its own code tells."""
    code = function.__code__
    has_inner = any(isinstance(each, types.CodeType) for each in code.co_consts)
    if has_inner or mark_of_function(function) is None or not all(is_library(name) for name, _ in imports(code)):
        return True
    known = function.__globals__
    return not all(is_library(_defining_module(known[name])) for name in global_names(code) if name in known)


def _defining_module(value: Any) -> str:
    """The Python module of a function or class, or the module itself. Anything else is the user's."""
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return str(getattr(value, "__module__", None))  # of some functions in C it is None
    return "__main__"


def kept_results(marks: Mapping[str, Hashable]) -> dict[str, types.CodeType]:
    """The functions in the marks of which a kept result was used since: by name, the code that computes it."""
    kept = ((name, mark.used_since()) for name, mark in marks.items() if isinstance(mark, KeptResults))
    return {name: code for name, code in kept if code is not None}
