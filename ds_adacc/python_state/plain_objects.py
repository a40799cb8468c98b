"""Objects that hold plain numbers and strings, such as a model's config: they are unchanged while their items are.

The blocks of most models refer to a config with dozens of attributes. Comparing these by identity takes a fraction of
the time that reading them takes (`guards.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ds_adacc.python_state.content import SCALARS, attributes_alone
from ds_adacc.python_state.guards import Guards, Walk, of_users

_SEQUENCES = frozenset({list, tuple})
_MOST_ITEMS = 4096  # of one value; more are read at every call, as far as `Walk` reads them


class PlainObjects:
    """Those of `values` that hold nothing but plain numbers and strings, in lists, dicts and objects.

    `places`: of these, among the values; `left`: of the others. `marks`: of them and of what they hold, except classes.
    `kinds`: the classes of the objects, without those of libraries. `names`: what `Walk` has called all objects that
    identity tells, by address: those that it was given in `names`, and those in these values.

    Only numbers and strings are kept alive. A list, a dict or an object is told by its address. Another one may lie
    there later; if it is of the same class and holds the same, then its marks are the same.
    """

    def __init__(self, values: Sequence[tuple[str, Any, int]], names: Mapping[int, str]) -> None:
        """`values`: each with its name and the depth to which it is read."""
        self.places: list[int] = []
        kinds: list[type] = []
        self._opened: list[list[tuple[int, type, int]]] = []  # by value: place among the items, class, number of items
        self._addresses: list[int] = []  # of the items
        self._kept: list[Any] = []
        known = set(names)
        for place, (_, value, _) in enumerate(values):
            if self._open(value, known, kinds):
                self.places.append(place)
        self.left = [place for place in range(len(values)) if place not in self.places]
        self.kinds = of_users(kinds)
        walk = Walk(names, self.kinds)
        for place in self.places:
            walk.value(*values[place])
        self.marks: Guards = walk.guards
        self.names = walk.met

    def _open(self, value: Any, known: set[int], kinds: list[type]) -> bool:
        """Take down what the value holds. False, and nothing is taken down, if some of it is not plain."""
        items, opened, met = [value], [], set(known)
        for place, item in enumerate(items):  # it grows
            if type(item) in SCALARS or id(item) in met:
                continue
            held = _held_by(item)
            if held is None or len(items) + len(held) > _MOST_ITEMS:
                return False
            met.add(id(item))
            opened.append((len(self._addresses) + place, type(item), len(held)))
            items += held
        known |= met
        self._opened.append(opened)
        self._addresses += map(id, items)
        self._kept += [item for item in items if type(item) in SCALARS]
        kinds += [kind for _, kind, _ in opened]
        return True

    def unchanged(self, values: Sequence[Any]) -> bool:
        """Whether those of the values that were plain hold the same as then."""
        items: list[Any] = []
        for place, opened in zip(self.places, self._opened, strict=True):
            items.append(values[place])
            for inner, kind, count in opened:
                value = items[inner]
                if type(value) is not kind:
                    return False
                before = len(items)  # as `_held_by` would give them: their class tells that there are no others
                if kind in _SEQUENCES:
                    items += value
                else:
                    held = value if kind is dict else value.__dict__
                    items += held
                    items += held.values()
                if len(items) - before != count:
                    return False
        return [*map(id, items)] == self._addresses


def _held_by(value: Any) -> list[Any] | None:
    """The items of a list, or the keys and values of a dict or of an object's attributes.

    None if the value is something else, or holds more than that.
    """
    if type(value) in _SEQUENCES:
        return [*value]
    held = value if type(value) is dict else attributes_alone(value)
    if held is None or not SCALARS.issuperset(map(type, held)):
        return None
    return [*held, *held.values()]
