"""What a block's program depends on besides the tensors among its arguments: flat marks, by dotted name (Rule R8).

Two calls whose marks are equal run the same program. Python objects are compared by content (`content.py`), classes,
Python modules and the like by identity. What cannot be read has a mark that says so: see `unreadable`. `Block.find`
in `execute/block.py` compares them at each call: if they differ, the block is recorded anew, unless what differs is
known to decide nothing (`GuardHistory.unread`).
"""

from __future__ import annotations

import collections
import functools
import numbers
import types
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ds_adacc.python_state.calls_in_c import why_unseen
from ds_adacc.python_state.content import (
    NUMBERS,
    SCALARS,
    Items,
    Unreadable,
    attributes_of,
    bytes_of,
    holds_attributes_alone,
    is_known_by_identity,
    items_of,
    mark_of_number,
    slots_of,
)
from ds_adacc.python_state.function_marks import mark_of_function, state_in, wrapped_in
from ds_adacc.python_state.held_tensors import inside
from ds_adacc.python_state.identity import WeakIdentity, identity_mark
from ds_adacc.python_state.kept_results import KeptResults, objects_kept
from ds_adacc.python_state.libraries import is_library, is_of_package
from ds_adacc.python_state.tensor_marks import has_tensor_mark, looks_of, mark_of_parameter

Guards = dict[str, Hashable]

MODULE_INTERNALS = frozenset(nn.Module().__dict__) - {"training"}  # attributes that are torch's own
# What DeepSpeed sets on modules. It changes at every call.
_DEEPSPEED = frozenset({"applied_pre_backward_ref_cnt", "pre_bwd_fn", "post_bwd_fn", "_original_parameters"})
_DEEPSPEED |= {"ds_id", "ds_grads_remaining", "ds_recompute_parameters", "ds_inflight_param_registry"}
_DEEPSPEED |= {"ds_external_parameters", "ds_model_granularity", "ds_autotp_parsed"}
_DYNAMO = frozenset({"dynamo_ctx"})  # what torch.compile(block) sets: how it compiles. Which graph ran is seen anyway
_NOT_GUARDED = MODULE_INTERNALS | _DEEPSPEED | _DYNAMO
_OF_BLOCKS = ("block", "variable around", "parameter")  # how the names of all begin that a block holds (`reading.py`)
DEPTH = 6
LONGEST = 256  # items of a container that are looked at one by one
_MOST_ATTRIBUTES = 1024  # of an object that are; the arguments of Megatron are hundreds
_MOST_ITEMS = 1 << 14  # of a container of plain numbers and strings
_MOST_MARKS = 4096  # reading more would cost too much at every step


def guards_of_values(values: Mapping[str, Any], tensors: list[torch.Tensor] | None = None) -> Guards:
    """The marks of values, by name. The tensors in them are appended to `tensors`."""
    walk = Walk()
    for name, value in values.items():
        walk.value(name, value, DEPTH)
    if tensors is not None:
        tensors += walk.tensors
    return walk.guards


def snapshot(value: Any, tensors: list[torch.Tensor] | None = None) -> Hashable:
    """A hashable key that is equal for two values with which a block runs the same program.

    The tensors in the value are appended to `tensors`.
    """
    return mark_of_number(value) if type(value) in SCALARS else tuple(guards_of_values({"": value}, tensors).items())


def holds(marks: Guards, value: Any) -> bool:
    """Whether one of the marks is that of this very object, which is one that is known by identity."""
    mark = identity_mark(value)
    return any(each is mark for each in marks.values())


def python_modules_in(marks: Any) -> Iterator[types.ModuleType]:
    """The Python modules of the user's that are known by the marks, or by a key that holds some."""
    known = (mark() for _, mark in _each_in(marks) if isinstance(mark, WeakIdentity))
    yield from (each for each in known if isinstance(each, types.ModuleType) and not is_library(each.__name__))


def refers_to_more(cls: type) -> bool:
    """Whether the class refers to more than the code of its functions: to attributes, closures, mutable defaults."""
    walk = Walk()
    walk.classes(cls)
    return not all(isinstance(mark, _Class) for mark in walk.guards.values())


def unreadable(marks: Any) -> str | None:
    """The first object in the marks, or in a key that holds some, whose content could not be read: name and reason."""
    found = ((name, mark) for name, mark in _each_in(marks) if isinstance(mark, Unreadable))
    return next((f"{name or 'an argument'} ({mark})" for name, mark in found), None)


def has_script(marks: Any) -> bool:
    """Whether one of them is of a function of TorchScript, or of a method."""
    kinds = (torch.jit.ScriptFunction, torch._C.ScriptMethod)
    return any(type(mark) is WeakIdentity and isinstance(mark(), kinds) for _, mark in _each_in(marks))


def _each_in(marks: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The marks one by one, or those in a key that holds some, each with its name."""
    if isinstance(marks, dict):
        marks = tuple(marks.items())
    if not isinstance(marks, tuple):
        yield name, marks
    elif len(marks) == 2 and type(marks[0]) is str:
        yield from _each_in(marks[1], marks[0])
    else:
        for each in marks:
            yield from _each_in(each, name)


class Walk:
    """Collects marks. An object that is met again is marked by its first name, so the walk ends on cycles.

    `tensors`: those that it has met, parameters left out. Their marks do not tell which of them are one.
    `met`: by identity, the names of objects, also of those whose marks are collected elsewhere. They must be alive.
    """

    def __init__(self, met: Mapping[int, str] = types.MappingProxyType({}), kinds: Iterable[type] = ()) -> None:
        """`kinds`: the classes whose marks are collected elsewhere."""
        self.guards: Guards = {}
        self.tensors: list[torch.Tensor] = []
        self.met = dict(met)
        self._kinds = set(kinds)
        self._classes: set[type] = set()
        self._trusts = False  # while it reads what an object of an installed package holds

    def value(self, name: str, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in SCALARS:
            self.guards[name] = mark_of_number(value)
        elif kind in weakref.ProxyTypes:
            self.guards[name] = Unreadable(kind, "its object may be gone")
        elif isinstance(value, torch.Tensor):
            if isinstance(value, nn.Parameter):
                self.guards[name] = mark_of_parameter(value)
            elif has_tensor_mark(value):
                self.guards[name] = looks_of(value)
                self.tensors.append(value)
            else:
                self.guards[name] = identity_mark(value)  # an unusual one, as of a subclass
            for key, part in inside(value):
                self.value(f"{name}.{key}", part, depth - 1)
        elif kind is RemovableHandle:
            self.guards[name] = kind  # of a hook, which is read where it is registered; its number is always new
        elif not self._met(name, value):
            if isinstance(value, nn.Module):
                self.guards[name] = why_unseen(value) or identity_mark(value)
                self._attributes(name, value, depth)
            elif is_known_by_identity(value):
                self.guards[name] = why_unseen(value) or identity_mark(value)
                if isinstance(value, type):
                    self.classes(value)
                elif isinstance(value, types.FunctionType | functools._lru_cache_wrapper):
                    self._wrapped(name, value, depth)
            elif type(value) is types.FunctionType and (mark := mark_of_function(value)) is not None:
                self.guards[name] = mark
            elif self._trusts or not is_of_package(value):
                self._content(name, value, depth)
            else:
                self._trusts = True
                self._content(name, value, depth)
                self._trusts = False
                if items_of(value) is not None:  # NumPy's generators, of which none can be read, are not trusted
                    self._trust(name, value)
            if self._trusts:
                self._trust(name, value)

    def _wrapped(self, name: str, function: Any, depth: int) -> None:
        """What a library's decorator has made the function of."""
        for number, each in enumerate(wrapped_in(function)):
            self.value(f"{name}.wrapped{number or ''}", each, depth)
            if isinstance(function, functools._lru_cache_wrapper):
                self.guards[f"{name}.results"] = KeptResults(function, each)
                for place, result in enumerate(objects_kept(function)):
                    self.value(f"{name}.result{place}", result, depth - 1)

    def _trust(self, name: str, value: Any) -> None:
        if isinstance(self.guards[name], Unreadable):
            self.guards[name] = identity_mark(value)

    def _content(self, name: str, value: Any, depth: int) -> None:
        kind, guards = type(value), self.guards
        if isinstance(value, int | float | complex | str | bytes | range | numbers.Number):
            guards[name] = mark_of_number(value)
            items = attributes_of(value)
        elif isinstance(value, set | frozenset):
            items = _attributes_of_plain_set(value)
            elements = None if items is None else tuple([(type(element), element) for element in value])
            guards[name] = Unreadable(kind, "it is a set of objects") if elements is None else (kind, elements)
        else:
            items = items_of(value)
            content = bytes_of(value) if items is None else _order(value, items)
            guards[name] = Unreadable(kind) if content is None else (kind, content)
            if isinstance(content, Unreadable):
                guards[name] = content
            elif content is not None and items is None:  # beside its bytes: the mask of a masked array, say
                items = attributes_of(value)
        if items is not None:
            self.classes(kind)
        if not items:
            return
        if depth <= 0 or len(guards) > _MOST_MARKS:
            guards[name] = Unreadable(kind, "it holds too much, or lies too deep, to be read at every step")
        elif len(items) > _most_items(kind):
            guards[name] = _long(kind, items)
        else:
            for place, (key, item) in enumerate(items):
                self.value(self._free(f"{name}{_step(key, place)}"), item, depth - 1)

    def classes(self, kind: type) -> None:
        """The bases, the functions and the other attributes of the user's classes."""
        if kind in self._kinds:
            return
        self._kinds.add(kind)
        for cls in kind.__mro__:
            if cls in self._classes or is_library(cls.__module__):
                continue
            self._classes.add(cls)
            name = cls.__qualname__
            name = self._free(f"class {name}" if name.startswith(_OF_BLOCKS) else name)
            self.guards[name] = None  # its attributes may refer to others of this name
            functions: list[Hashable] = []
            for key, value in vars(cls).items():
                if issubclass(cls, type) and _is_registry(value):
                    continue
                is_special = key[:2] == "__" and key != "__call__"  # perhaps made by a class decorator, with a closure
                if is_special and type(value) not in (types.FunctionType, *NUMBERS):
                    continue
                state = state_in(value)
                mark = None
                if type(state) is types.FunctionType:
                    mark = mark_of_function(state) or (state.__code__ if is_special else None)
                if mark is not None:
                    functions += key, mark
                elif state is not None:
                    self.value(self._free(f"{name}.{key}"), state, DEPTH)
            self.guards[name] = _Class(cls.__mro__, tuple(functions))
        if type(kind) is not type:
            self.classes(type(kind))

    def _attributes(self, name: str, module: nn.Module, depth: int) -> None:
        self.classes(type(module))
        for key in guarded(module):
            self.value(f"{name}.{key}", module.__dict__[key], depth)
        for key in slots_of(type(module)):
            self.value(f"{name}.{key}", getattr(module, key, None), depth)

    def _free(self, name: str) -> str:
        """The name, unless something else is called so: an attribute and an item, a class and one inside another."""
        while name in self.guards:
            name += "'"
        return name

    def _met(self, name: str, value: Any) -> bool:
        first = self.met.setdefault(id(value), name)
        if first is not name:
            self.guards[name] = "same", first
        return first is not name


def _is_registry(value: Any) -> bool:
    """Whether a metaclass keeps its classes there, or one object of each, as for singletons."""
    return isinstance(value, Mapping) and any(isinstance(key, type) for key in value)


def guarded(module: nn.Module) -> list[str]:
    """The names of the module's attributes that are guarded; most of the others are torch's own."""
    return [key for key in module.__dict__ if key not in _NOT_GUARDED]


def _order(value: Any, items: Items) -> Hashable:
    """How many items there are; their keys or names, if they have any: a block may compute with one after the other."""
    if isinstance(value, list | tuple | collections.deque) or len(items) > _most_items(type(value)):
        return len(items)
    return tuple([key if type(key) in SCALARS else _mark_of_key(key) for key, _ in items])


def _mark_of_key(key: Any) -> Hashable:
    """The mark of a key of a dict. The text of a key that is compared by identity may be that of others, or of data."""
    mark = identity_mark(key) if _is_told_by_identity(key) else None
    return mark if type(mark) is WeakIdentity else repr(key)  # a reading keeps no key alive


def _step(key: Any, place: int) -> str:
    """How an item is called within its container, in which it has this place. No other item is called so."""
    if type(key) is int:
        return f"[{key}]"
    if type(key) is str and "." not in key and "[" not in key:
        return f".{key}"
    return f"[{type(key).__name__} {place}]" if _is_told_by_identity(key) else f"[{key!r}]"


def _is_told_by_identity(key: Any) -> bool:
    return isinstance(key, torch.Tensor) or type(key).__hash__ is object.__hash__


def _most_items(kind: type) -> int:
    return _MOST_ATTRIBUTES if holds_attributes_alone(kind) else LONGEST


def _attributes_of_plain_set(value: Any) -> Items | None:
    """The attributes of a set; None if it has elements that are not plain numbers and strings."""
    plain = len(value) <= _MOST_ITEMS and all(type(element) in SCALARS for element in value)
    return items_of(value) if plain else None


def _long(kind: type, items: Items) -> Hashable:
    keys, values = zip(*items, strict=True)
    if len(items) <= _MOST_ITEMS and {*map(type, keys), *map(type, values)} <= SCALARS:
        return kind, keys, values, tuple(map(type, values))
    return Unreadable(kind, f"it holds more than {LONGEST} objects")


def of_users(kinds: Iterable[type]) -> list[type]:
    """The classes, each once, without those of libraries that inherit from none of the user's."""
    return [kind for kind in dict.fromkeys(kinds) if not all(is_library(cls.__module__) for cls in kind.__mro__)]


class _Class(NamedTuple):
    """The mark of a class of the user's: its bases, and its functions that hold nothing but code and plain defaults."""

    bases: tuple[type, ...]
    functions: tuple[Hashable, ...]
