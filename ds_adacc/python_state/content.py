"""What a Python object holds: its items, attributes and slots, or the reason why they cannot all be read (Rule R8)."""

from __future__ import annotations

import collections
import ctypes
import decimal
import enum
import functools
import logging
import numbers
import os
import threading
import types
import weakref
from collections.abc import Hashable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from ds_adacc.python_state.libraries import is_library

MOST_BYTES = 1 << 16  # of a buffer that is compared by content; comparing this many costs a few microseconds
SCALARS = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device})
NUMBERS = (int, float, bool, complex)
_EQUAL_IF_SAME = SCALARS - {float, complex} | {range}
_TOLD_OTHERWISE = (torch.nn.Module, torch.Tensor, numbers.Number, str, bytes)  # objects of which `guards.py` reads more
_HEAP = 1 << 9  # a flag of a class that is not built into Python
_POINTER = 8  # bytes of a slot, on every platform that torch supports
_BASES = (list, tuple, dict, set, frozenset, collections.deque, collections.OrderedDict, collections.defaultdict)
_NAMED = (type, types.ModuleType, types.CodeType, types.MethodDescriptorType, types.WrapperDescriptorType, enum.Enum)
_NAMED += (
    types.UnionType,
    types.GenericAlias,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    functools._lru_cache_wrapper,
    logging.Logger,
    ctypes._CFuncPtr,
    torch._ops.OperatorBase,  # its first call looks up its handle
    torch._ops.OpOverloadPacket,
)
# Classes written in C whose objects hold no number that Python computes with. Torch's operators are recorded.
_WITHOUT_NUMBERS = frozenset({"torch", "_thread", "_multiprocessing", "re", "_abc"})
# Packages whose objects are known by identity. A kernel of Triton holds what it has compiled and tuned so far; an
# annotation, as `typing` makes them, refers to other annotations.
_BY_IDENTITY = frozenset({"ds_adacc", "triton", "typing"})
_ENVIRONMENT = vars(os.environ)["_data"]
# The variables in it that torch and Triton set when they compile, which they may do in backward.
_PREFIXES = ("TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TORCH_WARM_POOL", "TRITON_", "CUBLAS_WORKSPACE_CONFIG")
_PREFIXES += ("KMP_DUPLICATE_LIB_OK", "CUDA_HOME", "CPLUS_INCLUDE_PATH")
_OF_COMPILERS = tuple(map(os.environ.encodekey, _PREFIXES))  # bytes, or on Windows text

Items = list[tuple[Any, Any]]


@dataclass(frozen=True)
class Unreadable:
    """In place of the content of an object that cannot be read. It is equal for all objects of the class."""

    kind: type
    why: str = "its class keeps its state where Python cannot read it"

    def __str__(self) -> str:
        return f"{self.kind.__module__}.{self.kind.__qualname__}: {self.why}"


def mark_of_number(value: Any) -> tuple[type, Any]:
    """The mark of a plain number, string or the like.

    Zeros differ by their sign, and decimals by their places, which equality does not tell; and a NaN is like any other,
    which equality denies.
    """
    kind = type(value)
    if kind in _EQUAL_IF_SAME:
        return kind, value
    is_odd = isinstance(value, complex | decimal.Decimal) or not value or value != value
    return kind, str(value) if is_odd else value


def is_same_number(value: Any, number: Any) -> bool:
    """Whether any value is of the same type as this plain number or string, and has the same mark."""
    return value is number or (type(value) is type(number) and mark_of_number(value) == mark_of_number(number))


def is_known_by_identity(value: Any) -> bool:
    """Whether the object holds no number that could change: a class, a Python module, a lock, a compiled kernel."""
    if isinstance(value, _NAMED) or type(value) is object:
        return True
    if isinstance(value, threading.local | torch.Size):
        return False
    if isinstance(value, types.FunctionType):
        return is_library(value.__globals__.get("__name__"))
    if type(value) is types.BuiltinFunctionType:
        owner = value.__self__
        return isinstance(owner, types.ModuleType | type | None) or is_pybinds(owner)
    package = type(value).__module__.partition(".")[0]
    return package in _BY_IDENTITY or (package in _WITHOUT_NUMBERS and not _is_visible(type(value)))


def is_pybinds(owner: Any) -> bool:
    """Whether it is pybind11's record of a function that it has bound, or a capsule with that: the function's owner."""
    return type(owner).__name__.startswith(("PyCapsule", "pybind11_"))


def items_of(value: Any) -> Items | None:
    """All that the object holds, by key, attribute or slot. None if some of it cannot be read."""
    try:
        return _items_of(value)
    except Exception:  # the user's code runs here: an iterator, an attribute
        return None


def _items_of(value: Any) -> Items | None:
    kind = type(value)
    if kind is list or kind is tuple or kind is torch.Size:
        return list(enumerate(value))
    if kind is dict:
        items = list(value.items())
        return [each for each in items if not each[0].startswith(_OF_COMPILERS)] if value is _ENVIRONMENT else items
    special = _special(value)
    if special is not None:
        return special
    if not _is_visible(kind):
        return None
    items = attributes_of(value)
    if isinstance(value, collections.OrderedDict):  # `move_to_end` changes an order that dict does not know
        items += collections.OrderedDict.items(value)
    elif isinstance(value, dict):
        items += dict.items(value)
    elif isinstance(value, list | tuple | collections.deque):
        items += enumerate(kind.__iter__(value))
    return items


def besides_items(value: Any) -> dict[str, Any] | Unreadable:
    """The attributes of a list, tuple or dict of a class of its own. Those that are items too are left out.

    Of a class of a library whose attributes are out of sight, as those of what `torch.max` returns: none.
    """
    kind = type(value)
    if not _is_visible(kind):
        return {} if is_library(kind.__module__) else Unreadable(kind)
    attributes = attributes_of(value)
    held = set(map(id, value.values() if isinstance(value, dict) else value)) if attributes else ()
    return {name: each for name, each in attributes if id(each) not in held}


def attributes_alone(value: Any) -> dict[str, Any] | None:
    """The attributes of an object of a Python class, if it holds nothing else, and is told by nothing else."""
    kind = type(value)
    if kind is types.SimpleNamespace:
        return vars(value)
    if not holds_attributes_alone(kind):
        return None
    own = getattr(value, "__dict__", None)
    if type(own) is not dict or is_known_by_identity(value) or _special(value) is not None:
        return None
    return own


def holds_attributes_alone(kind: type) -> bool:
    """Whether it is a class without slots that inherits from no container and from nothing built into Python."""
    if kind is types.SimpleNamespace:
        return True
    is_of_python = bool(kind.__flags__ & _HEAP) and kind.__basicsize__ == _size_without_slots(kind)
    return is_of_python and not issubclass(kind, (*_BASES, *_TOLD_OTHERWISE))


def bytes_of(value: Any) -> Hashable | None:
    """The content of an object with a buffer (an array of `array` or NumPy, a number in C); None without one."""
    try:
        with memoryview(value) as view:
            if view.nbytes > MOST_BYTES:
                return Unreadable(type(value), f"it has more than {MOST_BYTES} bytes")
            points = "O" in view.format or "&" in view.format  # to objects in Python, or to memory as a pointer in C
            return None if points else (view.format, view.shape, view.strides, view.tobytes())
    except (TypeError, ValueError, BufferError, NotImplementedError):
        return None


def contents_of(cell: types.CellType) -> tuple[Any, ...]:
    """What is in a closure's cell: one object, or none if its function has not assigned it yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _special(value: Any) -> Items | None:
    if isinstance(value, types.FunctionType):
        cells = [(f"<{n}>", c) for n, c in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)]
        defaults = [("defaults", value.__defaults__), ("kwdefaults", value.__kwdefaults__)]
        of_code = [("code", value.__code__), ("globals", id(value.__globals__))]
        return [*of_code, *cells, *((n, v) for n, v in defaults if v), *value.__dict__.items()]
    if isinstance(value, types.CellType):
        return [("contents", each) for each in contents_of(value)]
    if isinstance(value, types.MethodType):
        return [("self", value.__self__), ("func", value.__func__)]
    if isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
        return [("name", value.__name__), ("self", value.__self__)]
    if isinstance(value, functools.partial | functools.partialmethod):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords), *vars(value).items()]
    if isinstance(value, slice):
        return [("start", value.start), ("stop", value.stop), ("step", value.step)]
    if isinstance(value, types.MappingProxyType):
        return list(value.items())
    if isinstance(value, ContextVar):
        return [("value", value.get(None))]
    if type(value) in (weakref.ref, weakref.WeakMethod):
        return [("referent", value())]
    if isinstance(value, types.SimpleNamespace | threading.local):
        return list(vars(value).items())
    return None


def attributes_of(value: Any) -> Items:
    """What is in its `__dict__` and in its slots."""
    kind, own = type(value), getattr(value, "__dict__", None)
    items = list(own.items()) if isinstance(own, dict) else []
    if kind.__basicsize__ != _size_without_slots(kind):
        for slot in _slots(kind):
            try:
                items.append((slot.__name__, slot.__get__(value, kind)))
            except AttributeError:  # a slot that is not assigned
                continue
    if isinstance(value, collections.defaultdict):
        items.append(("default_factory", value.default_factory))
    if isinstance(value, collections.deque):
        items.append(("maxlen", value.maxlen))
    return items


@functools.lru_cache(256)  # the layout of a class does not change, and classes of arguments are looked at in each call
def _is_visible(kind: type) -> bool:
    """Whether all fields of the class's objects are items, attributes or slots: its size leaves no room for others."""
    size = _size_without_slots(kind)
    return kind.__basicsize__ == size or kind.__basicsize__ == size + _POINTER * len(_slots(kind))


def _size_without_slots(kind: type) -> int:
    base = next(cls for cls in kind.__mro__ if cls in _BASES or cls is object)
    return _SIZES[base, kind.__dictoffset__ != 0, kind.__weakrefoffset__ != 0]


def slots_of(kind: type) -> list[str]:
    """The names of the slots of the class's objects."""
    return [slot.__name__ for slot in _slots(kind)]


def _slots(kind: type) -> list[types.MemberDescriptorType]:
    classes = [cls for cls in kind.__mro__ if "__slots__" in vars(cls)]
    return [each for cls in classes for each in vars(cls).values() if type(each) is types.MemberDescriptorType]


def _size(base: type, has_dict: bool, has_weakref: bool) -> int:
    """Bytes of an object of a Python class that adds no slots to `base`."""
    names = ("__dict__",) * (has_dict and not base.__dictoffset__)
    names += ("__weakref__",) * (has_weakref and not base.__weakrefoffset__)
    body = {} if base is tuple and names == ("__dict__",) else {"__slots__": names}  # tuple allows no slots by name
    try:
        return type("_", (base,), body).__basicsize__
    except TypeError:  # no class that is derived from tuple allows weak references
        return -1


_SIZES = {(b, d, w): _size(b, d, w) for b in (*_BASES, object) for d in (False, True) for w in (False, True)}
