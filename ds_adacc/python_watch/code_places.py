"""The places that a function's code reads besides its arguments, as far as the names in it tell."""

from __future__ import annotations

import importlib.util
import pickle
import random
import sys
import types
from collections.abc import Mapping
from typing import Any

import numpy.random
import torch

from ds_adacc.python_state.codes import global_names, imports
from ds_adacc.python_state.content import NUMBERS
from ds_adacc.python_state.libraries import TRUSTED, is_library
from ds_adacc.python_state.places import Place

# The Python modules whose functions draw random numbers.
RANDOM = frozenset({"random", "_random", "numpy.random", "numpy.random.mtrand", "numpy.random._generator", "secrets"})
# Python's own random generator, and NumPy's: what their functions are bound to.
_GENERATORS = tuple(getattr(function, "__self__", None) for function in (random.random, numpy.random.random))
_ASKING = frozenset({"getattr", "hasattr", "vars", "globals", "__dict__"})  # whether something is there
_IMPORTING = frozenset({"import_module", "__import__"})  # functions that get the name as a text
_WITHOUT_STATE = (types.NoneType, types.NotImplementedType, types.EllipsisType)


class CodePlaces:
    """What one code reads of globals, of what it imports, and of Python modules that it is given.

    `found`: the places, by a name for messages. `sources`: those of numbers that no guard can read, as of `Watch`.
    """

    def __init__(self, code: types.CodeType) -> None:
        self.found: dict[str, Place] = {}
        self.sources: dict[str, bool] = {}
        self._code = code
        # A text may be the name in `globals()["name"]` or in `getattr(module, "name")`.
        texts = self._texts = [each for each in code.co_consts if type(each) is str]
        self._names = tuple(dict.fromkeys((*code.co_names, *texts)))
        self._globals = {*global_names(code), *texts}
        # What is not there yet, but may be at a later call: `getattr(module, "name", 1.0)` has an answer for now.
        asks = not _ASKING.isdisjoint(code.co_names)
        self._may_come = {text for text in texts if text.isidentifier()} if asks else set[str]()
        self._met: set[types.ModuleType] = set()

    def add_globals(self, frame: types.FrameType) -> None:
        """Add what the code names of its globals, and of the Python modules in its closure."""
        namespace, builtin = frame.f_globals, frame.f_builtins
        for name in self._names:
            is_global = name in self._globals
            if is_global and name in namespace:
                self._add_global(namespace, name)
            elif is_global and not _is_pythons(builtin.get(name)):
                self._add_global(builtin, name)
            elif name in self._may_come or (is_global and name not in self._texts and name not in builtin):
                self._add(namespace, name)
        for name in self._code.co_freevars:
            if isinstance(frame.f_locals.get(name), types.ModuleType):
                self.add_members(frame.f_locals[name])

    def add_imports(self, namespace: Mapping[str, Any]) -> bool:
        """Add what the code names of the Python modules that it imports itself. False: some are not there yet."""
        known = [_imported_module(name, level, namespace) for name, level in imports(self._code)]
        if not _IMPORTING.isdisjoint(self._code.co_names):
            known += map(sys.modules.get, self._texts)
        for module in known:
            if module is not None:
                self.add_members(module)
        return None not in known

    def add_members(self, module: types.ModuleType) -> None:
        """Add the members of a Python module that the code names. Of a library, only the data of some are guarded."""
        if module in self._met:  # Python modules may refer to one another
            return
        self._met.add(module)
        source, members = module.__name__, vars(module)
        for name in self._names:
            if name.startswith("__") and type(members.get(name)) not in NUMBERS:
                continue
            if name not in members:
                if name in self._may_come and not is_library(source):
                    self._add(members, name)
                continue
            value = members[name]
            if isinstance(value, types.ModuleType):
                if value.__name__ in RANDOM or not is_library(value.__name__):
                    self.add_members(value)
            elif source in RANDOM and callable(value) and not isinstance(value, type):
                self._cannot_guard(f"{source}.{name}", value)
            elif source.partition(".")[0] not in TRUSTED and not (is_library(source) and callable(value)):
                self._add(members, name)

    def _add_global(self, namespace: Mapping[str, Any], name: str) -> None:
        value = namespace[name]
        if isinstance(value, types.ModuleType):
            self.add_members(value)
        elif _source(value) in RANDOM:
            self._cannot_guard(f"{namespace.get('__name__')}.{name}", value)
        elif not (isinstance(value, type) and is_library(value.__module__)):
            self._add(namespace, name)

    def _add(self, namespace: Mapping[str, Any], name: str) -> None:
        self.found.setdefault(f"{_name_of(namespace)}.{name}", (namespace, name))

    def _cannot_guard(self, what: str, function: Any) -> None:
        owner = getattr(function, "__self__", None)
        self.sources.setdefault(f"{what} in {self._code.co_name}", is_put_back(owner))


def _name_of(namespace: Mapping[str, Any]) -> str:
    """The name of a Python module, by its namespace; with its address, unless this is the module that has the name.

    A program may load several files under one name, as for its configs.
    """
    name = str(namespace.get("__name__"))
    has_name = getattr(sys.modules.get(name), "__dict__", None) is namespace
    return name if has_name else f"{name} at {id(namespace):#x}"


def _is_pythons(value: Any) -> bool:
    """Whether it is one of Python's own builtins, or None. Programs put others there, to have them everywhere."""
    if isinstance(value, type | types.BuiltinFunctionType):
        return value.__module__ in ("builtins", "io", "_io")  # of the latter is `open`
    kind = type(value)
    return kind in _WITHOUT_STATE or kind.__module__ == "_sitebuiltins"


def is_put_back(owner: Any) -> bool:
    """Whether it is a random generator whose state a second forward puts back (Rule E17)."""
    return any(owner is generator for generator in _GENERATORS)


def state_of_numpy() -> bytes:
    """The state of NumPy's generator, to be compared. A program may have set another bit generator."""
    return pickle.dumps(numpy.random.get_state(legacy=False))


def _imported_module(name: str, level: int, namespace: Mapping[str, Any]) -> types.ModuleType | None:
    """The Python module that an import in this namespace refers to; None if it is not there yet."""
    try:
        return sys.modules.get(importlib.util.resolve_name("." * level + name, namespace.get("__package__")))
    except ImportError:  # the import will say so
        return None


def _source(value: Any) -> str | None:
    """The Python module of the object that a bound method of C code belongs to."""
    # A `__getattr__` of the user's may raise what it likes, so only a class that has the attribute is asked.
    is_bound = hasattr(type(value), "__self__") and not isinstance(value, type | types.ModuleType | torch.Tensor)
    owner = value.__self__ if is_bound else None
    return None if owner is None else type(owner).__module__
