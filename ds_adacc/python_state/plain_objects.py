"""Objects that hold plain numbers, strings and tensors: they are unchanged while their items are.

The blocks of most models refer to a config with dozens of attributes, and a quantized weight refers to its scales.
Comparing these by identity takes a fraction of the time that reading them takes (`guards.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ds_adacc.python_state.content import SCALARS, attributes_alone
from ds_adacc.python_state.guards import Guards, Walk, of_users
from ds_adacc.python_state.held_tensors import inside
from ds_adacc.python_state.tensor_marks import has_tensor_mark, looks_of, mark_of_parameter

_SEQUENCES = frozenset({list, tuple, torch.Size})
_MOST_ITEMS = 4096  # of one value; more are read at every call, as far as `Walk` reads them
_MOST_CHANGES = 2  # of one value; from then on it is read at every call

_Open = Callable[[Any], Sequence[Any]]  # returns the items of an object
_Opened = tuple[int, type, _Open, int]  # the place among the items of a value, the class, how, the number of its items


class _Plain(NamedTuple):
    """A value: what of it is opened, and what `_look_at` has returned of it."""

    name: str
    opened: Sequence[_Opened]
    seen: Any


class PlainObjects:
    """Those of `values` that hold nothing but numbers, strings and tensors, in lists, dicts, objects and parameters.

    `places`: of these, among the values; `left`: of the others. `marks`: of them and of what they hold, except classes.
    `kinds`: the classes of the objects, without those of libraries. `names`: what `Walk` has called all objects that
    identity tells, by address: those that it was given in `names`, and those in these values. `changes`: by name, how
    often a value has been found changed. One that the block sets at every call is left too, after a few: if it were
    not, all others would be read anew with it.

    Only numbers and strings are kept alive. A list, a dict or an object is told by its address. Another one may lie
    there later; if it is of the same class and holds the same, then its marks are the same. Tensors and parameters are
    told by what their marks tell.
    """

    def __init__(
        self, values: Sequence[tuple[str, Any, int]], names: Mapping[int, str], changes: Mapping[str, int]
    ) -> None:
        """`values`: each with its name and the depth to which it is read."""
        self.changes = changes
        self._plain: dict[int, _Plain] = {}  # by place
        self._kept: list[Any] = []
        kinds: list[type] = []
        known = set(names)
        for place, (name, value, _) in enumerate(values):
            opened = None if changes.get(name, 0) >= _MOST_CHANGES else self._open(value, known, kinds)
            if opened is not None:
                self._plain[place] = _Plain(name, opened, _look_at(value, opened, []))
        self.places = [*self._plain]
        self.left = [place for place in range(len(values)) if place not in self._plain]
        self.kinds = of_users(kinds)
        walk = Walk(names, self.kinds)
        for place in self.places:
            walk.value(*values[place])
        self.marks: Guards = walk.guards
        self.names = walk.met

    def _open(self, value: Any, known: set[int], kinds: list[type]) -> list[_Opened] | None:
        """What of the value is opened. None, and nothing is noted, if some of it is not plain."""
        opened: list[_Opened] = []
        items, met = [value], set(known)
        for place, item in enumerate(items):  # it grows
            if type(item) in SCALARS or id(item) in met:
                continue
            how = _opener_of(item)
            held = () if how is None else how(item)
            if how is None or len(items) + len(held) > _MOST_ITEMS:
                return None
            if how not in (_of_tensor, _of_parameter):  # which `Walk` marks wherever it meets them
                met.add(id(item))
            opened.append((place, type(item), how, len(held)))
            items += held
        known |= met
        self._kept += [item for item in items if type(item) in SCALARS]
        kinds += [kind for _, kind, _, _ in opened if not issubclass(kind, torch.Tensor)]
        return opened

    def unchanged(self, values: Sequence[Any]) -> list[torch.Tensor] | None:
        """The tensors in those of the values that were plain, if these hold the same as then; else None."""
        tensors: list[torch.Tensor] = []
        for place, plain in self._plain.items():
            if _look_at(values[place], plain.opened, tensors) != plain.seen:
                return None
        return tensors

    def changes_now(self, values: Sequence[Any]) -> Mapping[str, int]:
        """`changes`, with those that are found now."""
        pairs = ((plain, _look_at(values[place], plain.opened, [])) for place, plain in self._plain.items())
        return Counter(self.changes) + Counter(plain.name for plain, seen in pairs if seen != plain.seen)


def _look_at(value: Any, opened: Sequence[_Opened], tensors: list[torch.Tensor]) -> Any:
    """What tells whether a value that was plain holds the same. The tensors in it are appended to `tensors`.

    None if it does not hold as many items of the same classes as then.
    """
    items, mine = [value], []
    parameters: list[torch.Tensor] = []
    for place, kind, how, count in opened:
        item = items[place]
        if type(item) is not kind:
            return None
        if how is _of_tensor:
            if not has_tensor_mark(item):
                return None
            mine.append(item)
            items[place] = None  # its address is no matter
            continue
        if how is _of_parameter:
            parameters.append(item)
        before = len(items)
        items += how(item)
        if len(items) - before != count:
            return None
    addresses = [*map(id, items)]
    if not mine and not parameters:
        return addresses
    tensors += mine
    looks = [*map(looks_of, mine)], [*map(mark_of_parameter, parameters)]
    return addresses, *looks


def _opener_of(value: Any) -> _Open | None:
    """What returns the items of an object, if it holds plain items and nothing else, or else None."""
    kind = type(value)
    if kind in _SEQUENCES:
        return _of_sequence
    if issubclass(kind, torch.Tensor):
        return _of_tensor if has_tensor_mark(value) else _of_parameter if isinstance(value, nn.Parameter) else None
    how, held = (_of_dict, value) if kind is dict else (_of_object, attributes_alone(value))
    return how if held is not None and SCALARS.issuperset(map(type, held)) else None


# Once an object is known to be plain, its class tells that it holds nothing else.
def _of_sequence(value: Any) -> Sequence[Any]:
    return value


def _of_tensor(_: torch.Tensor) -> Sequence[Any]:
    return ()


def _of_parameter(parameter: nn.Parameter) -> Sequence[Any]:
    return [each for item in inside(parameter) for each in item]


def _of_dict(value: dict[Any, Any]) -> Sequence[Any]:
    return [*value, *value.values()]


def _of_object(value: Any) -> Sequence[Any]:
    return _of_dict(value.__dict__)
