"""How the forward that a runtime has put on a block is told from a forward of the user's own."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_ATTRIBUTE = "covered"  # a user's function may have an attribute of that name, but no `Covered` in it


@dataclass(frozen=True)
class Covered:
    """What a runtime's forward covers. `own`: a forward that was set on the block itself; None if only its class had
    one. `code`: that of the runtime's forward."""

    own: Callable[..., Any] | None
    code: types.CodeType

    def is_of(self, function: object) -> bool:
        """Whether this is the runtime's forward itself: a decorator gives its attributes to another function."""
        return isinstance(function, types.FunctionType) and function.__code__ is self.code


def cover(forward: types.FunctionType, own: Callable[..., Any] | None) -> None:
    """Mark a runtime's forward. `own`: as in `Covered`."""
    setattr(forward, _ATTRIBUTE, Covered(own, forward.__code__))


def covered_by(function: object) -> Covered | None:
    """What the forward of a runtime covers, also one that was decorated since; None for any other function."""
    covered = getattr(function, _ATTRIBUTE, None)
    return covered if isinstance(covered, Covered) else None
