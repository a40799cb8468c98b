"""The places that functions read besides their arguments: names in Python modules and classes, with what is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ds_adacc.python_state.guards import Guards, guards_of_values

_ABSENT = object()  # the mark of a name that is not there: code may ask for it, and it may come later
GLOBAL = "global "  # how the names of their marks begin
Place = tuple[Mapping[str, Any], str]  # the namespace of a Python module or class, and the name in it


class Reads:
    """What functions were seen to read.

    `places`: where that is found, by a name for messages; `marks`: what was there when each place was noted first.
    """

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}
        self.marks: Guards = {}

    def note(self, places: Mapping[str, Place]) -> None:
        """A function begins, which reads these places."""
        new = {name: place for name, place in places.items() if name not in self.places}
        self.places.update(new)
        self.marks.update(marks_of(new))


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
