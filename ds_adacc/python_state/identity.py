"""The mark of an object by identity: it is equal to that of the same object alone."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any


def identity_mark(value: Any) -> WeakIdentity | StrongIdentity:
    """A mark that is equal for the same object only: the one that it has, as that is found to be equal soonest."""
    try:
        for known in weakref.getweakrefs(value):
            if type(known) is WeakIdentity:
                return known
        return WeakIdentity(value)
    except TypeError:
        return StrongIdentity(value)


class WeakIdentity(weakref.ref):
    """An object by identity: equal to a reference to the same live object, and to none once the object is gone."""

    __slots__ = ("_address",)
    _address: int

    def __new__(cls, value: Any) -> WeakIdentity:
        made = super().__new__(cls, value)
        made._address = id(value)
        return made

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        value = self()
        return value is not None and isinstance(other, WeakIdentity) and other() is value

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return self._address


class StrongIdentity:
    """An object by identity that allows no weak references. It is kept alive so that its address is not used again."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StrongIdentity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def without_identity(mark: Hashable) -> Hashable:
    """The mark. That of a module or a parameter does not tell which one it is."""
    return mark[1:] if type(mark) is tuple and mark and isinstance(mark[0], WeakIdentity | StrongIdentity) else mark
