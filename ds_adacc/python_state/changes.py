"""What has changed of what a block's program depends on, from one call to another."""

from __future__ import annotations

import collections
from collections.abc import Hashable

from ds_adacc.python_state.guards import Guards, is_by_identity

_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)


def moved(before: Guards, after: Guards) -> set[str] | None:
    """The numbers and the containers that differ, by name; None if anything else does.

    A container differs if it has other items than before: a list that grows, a dict with other keys. Its name stands
    for all that is in it, which must be plain: of another module or function, nobody knows what it does.
    """
    names = set(differing(before, after))
    pairs = {name: (before[name], after[name]) for name in names & before.keys() & after.keys()}
    containers = {name for name, marks in pairs.items() if all(map(_is_of_container, marks))}
    inside = {name for name in names if any(_is_inside(name, container) for container in containers)}
    if any(is_by_identity(marks.get(name)) for name in inside for marks in (before, after)):
        return None
    outside = names - inside
    others = outside - containers
    return outside if all(name in pairs and all(map(is_number, pairs[name])) for name in others) else None


def differing(before: Guards, after: Guards) -> list[str]:
    """The names whose marks differ, or of which only one has a mark."""
    there = [name for name, mark in after.items() if name not in before or mark != before[name]]
    return there + [name for name in before if name not in after]


def is_number(mark: Hashable) -> bool:
    """Whether the mark is that of a plain int or float."""
    return isinstance(mark, tuple) and mark[0] in (int, float)


def _is_of_container(mark: Hashable) -> bool:
    return isinstance(mark, tuple) and isinstance(mark[0], type) and issubclass(mark[0], _CONTAINERS)


def _is_inside(name: str, container: str) -> bool:
    return name.startswith(container) and name[len(container) : len(container) + 1] in ("[", ".")
