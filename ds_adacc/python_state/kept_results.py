"""Results that a function of the user's has kept, as `functools.lru_cache` does: were some used while recording?

Such a result was computed before, perhaps of globals that have changed since, and no watch has seen of which.
"""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from ds_adacc.python_state.codes import global_names, imports
from ds_adacc.python_state.content import SCALARS, is_known_by_identity
from ds_adacc.python_state.function_marks import mark_of_function
from ds_adacc.python_state.libraries import is_library

_MOST_RESULTS = 32  # to look at all of them at every call takes long
_MOST = 4  # results that are read at every call; a table for each length would have the block recorded at each


class KeptResults:
    """The mark of a function of the user's that keeps its results. It is equal to any other one.

    `code`: what computes the results.
    """

    def __init__(self, function: functools._lru_cache_wrapper[Any], computes: types.FunctionType) -> None:
        self.code = computes.__code__
        self._function = weakref.ref(function)
        self._hits = function.cache_info().hits
        self._computes = weakref.ref(computes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeptResults)

    def __hash__(self) -> int:
        return 0

    def used_since(self) -> types.CodeType | None:
        """The code that has computed a result which was taken since, if it reads anything of the user's; else None.

        None too if the function's result is declared constant, as `torch.compiler.assume_constant_result` does.
        """
        function, computes = self._function(), self._computes()
        if function is None or computes is None or function.cache_info().hits <= self._hits:
            return None
        if getattr(function, "_dynamo_marked_constant", False):
            return None
        return self.code if _reads_more(computes) else None


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


def objects_kept(function: functools._lru_cache_wrapper[Any]) -> list[Any]:
    """The results that the function has kept, as far as they can change: objects, lists, dicts. Of many, none.

    Those may be settings that the program changes later: it calls the function too, and gets the same object.
    """
    if getattr(function, "_dynamo_marked_constant", False) or function.cache_info().currsize > _MOST_RESULTS:
        return []
    referred = gc.get_referents(function)  # keys and results, unless the dict has them, the dict, what computes, ...
    place = next((n for n, each in enumerate(referred) if each is function.__wrapped__), 0) - 1
    if place < 0 or type(referred[place]) is not dict:
        return []
    found = {id(each): each for each in (*referred[:place], *referred[place].values()) if _may_change(each)}
    return [found[key] for key in sorted(found)] if len(found) <= _MOST else []


def _may_change(result: Any) -> bool:
    is_of_cache = type(result).__module__ == "functools"
    is_fixed = type(result) in SCALARS or isinstance(result, torch.Tensor | tuple | frozenset | types.FunctionType)
    return not (is_of_cache or is_fixed or is_known_by_identity(result))


def kept_results(marks: Mapping[str, Hashable]) -> dict[str, types.CodeType]:
    """The functions in the marks of which a kept result was used since: by name, the code that computes it."""
    kept = ((name, mark.used_since()) for name, mark in marks.items() if isinstance(mark, KeptResults))
    return {name: code for name, code in kept if code is not None}
