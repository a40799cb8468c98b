"""What has changed of what a block's program depends on, from one call to another."""

from __future__ import annotations

import collections
from collections.abc import Collection, Hashable
from numbers import Number

from torch import nn

from ds_adacc.python_state.content import SCALARS, holds_attributes_alone, mark_of_number
from ds_adacc.python_state.guards import Guards
from ds_adacc.python_state.tensor_marks import TensorMark

_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)


def changed_values(before: Guards, after: Guards, ignored: Collection[str]) -> set[str] | None:
    """The numbers and the containers that differ, by name; None if anything else does.

    A number that has changed has its own name here. If another plain item of a container has changed, has come or has
    gone, the name of the container stands for all that is in it. Modules and functions are not plain, since nobody
    knows what a change of them does. The name of an `ignored` container stands for all that is in it, too.
    """
    names: set[str] = set()
    for name in differing(before, after):
        marks = before.get(name), after.get(name)
        if all(map(is_number, marks)) or all(map(_is_of_container, marks)):
            names.add(name)
            continue
        owner = _owner(name, before, after)
        if owner is None or not all(mark is None or _is_plain(mark) for mark in marks):
            return None
        names.add(owner)
    owners = [each for each in (*names, *ignored) if _is_of_container(before.get(each)) and each in after]
    return {next((each for each in owners if _is_inside(name, each)), name) for name in names}


def names_of_changes(before: Guards, after: Guards, ignored: Collection[str]) -> set[str]:
    """What to name of all that differs: the numbers and the containers, or the first of anything else."""
    changed = changed_values(before, after, ignored)
    if changed is not None:
        return changed - set(ignored)
    names = differing(before, after)
    return {next((name for name in names if name in before and name in after), "what it holds")}


def _owner(name: str, before: Guards, after: Guards) -> str | None:
    """The innermost container, there before and after, in which the object of this name is."""
    cuts = (place for place in range(len(name) - 1, 0, -1) if name[place] in "[.")
    outer = (name[:cut] for cut in cuts)
    return next((each for each in outer if all(_is_of_container(marks.get(each)) for marks in (before, after))), None)


def differing(before: Guards, after: Guards) -> list[str]:
    """The names whose marks differ, or of which only one has a mark."""
    if before is after or before == after:  # as in most calls
        return []
    there = [name for name, mark in after.items() if name not in before or mark != before[name]]
    return there + [name for name in before if name not in after]


def rewritten(before: Guards, after: Guards) -> set[str]:
    """What was there before and is another now, by name.

    What has only come is none of it, such as a cache that was filled, or a tensor in a new attribute of a module.
    """
    nothing = (None, mark_of_number(None))
    changed = [name for name in differing(before, after) if name in before and name in after]
    there = (name for name in changed if before[name] not in nothing)
    return {name for name in there if _without_attributes(before[name]) != _without_attributes(after[name])}


def _without_attributes(mark: Hashable) -> Hashable:
    """The mark; that of a module or an object without the names of its attributes, which have marks of their own."""
    if not isinstance(mark, tuple) or not is_of_attributes(mark):
        return mark
    return mark[0] if isinstance(mark[0], type) else (*mark[:3], *mark[4:])


def is_number(mark: Hashable) -> bool:
    """Whether the mark is that of a plain int or float."""
    return isinstance(mark, tuple) and mark[0] in (int, float)


def is_of_attributes(mark: Hashable) -> bool:
    """Whether the mark is that of a module, or of an object that holds attributes and nothing else."""
    if not isinstance(mark, tuple) or not mark:
        return False
    if isinstance(mark[0], type):
        return holds_attributes_alone(mark[0])
    return len(mark) > 1 and isinstance(mark[1], type) and issubclass(mark[1], nn.Module)


def _is_of_container(mark: Hashable) -> bool:
    return isinstance(mark, tuple) and isinstance(mark[0], type) and issubclass(mark[0], _CONTAINERS)


def _is_plain(mark: Hashable) -> bool:
    """Whether the mark is that of a number, a string or the like, a tensor, or a container."""
    if isinstance(mark, TensorMark):
        return True
    kind = mark[0] if isinstance(mark, tuple) and mark else None
    return isinstance(kind, type) and (kind in SCALARS or issubclass(kind, (Number, *_CONTAINERS)))


def _is_inside(name: str, container: str) -> bool:
    return name.startswith(container) and name[len(container) : len(container) + 1] in ("[", ".")
