"""The places that functions read besides their arguments, names in Python modules and classes; what is there now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ds_adacc.python_state.guards import Guards, guards_of_values

_ABSENT = object()  # the mark of a name that is not there: code may ask for it, and it may come later
GLOBAL = "global "  # how the names of their marks begin
Place = tuple[Mapping[str, Any], str]  # the namespace of a Python module or class, and the name in it


def marks_of(places: Mapping[str, Place], tensors: list[torch.Tensor] | None = None) -> Guards:
    """The marks of what is at these places now. Those of one place do not depend on the others.

    None is called as what a block holds: "block.scale" is an attribute, "global block.scale" lies in a file block.py.
    The tensors that are there are appended to `tensors`.
    """
    marks: Guards = {}
    for place, (namespace, key) in places.items():
        name = f"{GLOBAL}{place}"
        if key not in namespace:
            marks[name] = _ABSENT
            continue
        for part, mark in guards_of_values({name: namespace[key]}, tensors).items():
            marks[part if part.startswith(name) else f"{name}: {part}"] = mark
    return marks
