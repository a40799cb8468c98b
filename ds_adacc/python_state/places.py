"""The places that functions read besides their arguments: names in Python modules and classes, with what is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_adacc.python_state.guards import Guards, guards_of_values

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


def marks_of(places: Mapping[str, Place]) -> Guards:
    """The marks of what is at these places now. Those of one place do not depend on the others."""
    marks: Guards = {}
    for name, place in places.items():
        for part, mark in guards_of_values({name: place[0].get(place[1])}).items():
            marks[part if part.startswith(name) else f"{name}: {part}"] = mark
    return marks
