"""What functions read besides their arguments: at which places, names in Python modules and classes, and what is there.

For a kernel in Python all of it must be there again when it is replayed. Such kernels are the forward of an
`autograd.Function`, and those of operators that are defined by `torch.library`.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS

from ds_adacc.python_state.changes import differing
from ds_adacc.python_state.function_marks import wrapped_in
from ds_adacc.python_state.guards import Guards, guards_of_values
from ds_adacc.python_state.libraries import is_library

_ABSENT = object()  # the mark of a name that is not there: code may ask for it, and it may come later
_GLOBAL = "global "  # how the names of their marks begin
Place = tuple[Mapping[str, Any], str]  # the namespace of a Python module or class, and the name in it


def marks_of(places: Mapping[str, Place], tensors: list[torch.Tensor] | None = None) -> Guards:
    """The marks of what is at these places now. Those of one place do not depend on the others.

    None is called as what a block holds: "block.scale" is an attribute, "global block.scale" lies in a file block.py.
    The tensors that are there are appended to `tensors`.
    """
    marks: Guards = {}
    for place, (namespace, key) in places.items():
        name = f"{_GLOBAL}{place}"
        if key not in namespace:
            marks[name] = _ABSENT
            continue
        for part, mark in guards_of_values({name: namespace[key]}, tensors).items():
            marks[part if part.startswith(name) else f"{name}: {part}"] = mark
    return marks


class PythonReads:
    """What functions were seen to read.

    `places`: where that is found, by a name for messages; `marks`: what was there when each place was noted first.
    """

    def __init__(self, places: Mapping[str, Place] = types.MappingProxyType({})) -> None:
        self.places: dict[str, Place] = {}
        self.marks: Guards = {}
        self.note(places)

    def note(self, places: Mapping[str, Place]) -> None:
        """A function begins, which reads these places."""
        new = {name: place for name, place in places.items() if name not in self.places}
        self.places.update(new)
        self.marks.update(marks_of(new))

    def changed(self) -> str | None:
        """The name of something that is not as it was; None if all of it is."""
        changed = differing(self.marks, marks_of(self.places))
        return changed[0].removeprefix(_GLOBAL) if changed else None

    def check(self, operator: str) -> None:
        """Raises RuntimeError if anything is not as it was: `operator` may make something else now."""
        changed = self.changed()
        if changed is not None:
            raise RuntimeError(
                f"{operator} cannot be replayed: {changed}, which its forward reads, has changed between forward and "
                "backward. Give it as an argument, or change it after backward"
            )


def places_of_kernels(func: Any) -> dict[str, Place]:
    """Where the Python functions are found that run when the operator `func` is called: they may have closures.

    Those of `torch.library.custom_op` and `triton_op`. Several operators may have kernels of one name.
    Torch does not tell which functions `Library.impl` was given.
    """
    definition = OPDEFS.get(getattr(func, "_name", None))
    if definition is None:
        return {}
    kernels = (definition._init_fn, *definition._backend_fns.values())
    users = chain.from_iterable(map(_users, kernels))
    found = {f"{func._name}.{kernel.__module__}.{kernel.__qualname__}": kernel for kernel in users}
    return {name: (found, name) for name in found}


def _users(kernel: Any) -> list[types.FunctionType]:
    """The user's function that `kernel` is, or those that torch has wrapped into it."""
    if not isinstance(kernel, types.FunctionType):
        return []
    return wrapped_in(kernel) if is_library(kernel.__globals__.get("__name__")) else [kernel]
