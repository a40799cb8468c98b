"""What the function of a call reaches by itself: a second forward must find that as it was (Rule E17).

A function that is made anew at each call reaches modules, tensors and numbers by the variables around it. What those
stand for may change before backward: in a loop, a `lambda` finds what its last round has put there.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

from torch import nn

from ds_adacc.program.replay import modified
from ds_adacc.python_state.closure import Closure, closure_of
from ds_adacc.python_state.content import SCALARS, mark_of_number
from ds_adacc.python_state.identity import identity_mark
from ds_adacc.python_state.tensor_marks import version_of


class Reached:
    """What a function reaches now: in its variables, defaults and globals, and in the containers among them.

    It keeps none of that alive.
    """

    __slots__ = ("_function", "_numbers", "_objects", "_versions")

    def __init__(self, function: Callable[..., Any]) -> None:
        closure = closure_of(function)
        self._function = function
        self._objects, self._numbers = _marks(closure)
        self._versions = [
            (weakref.ref(each), version_of(each)) for each in closure.tensors if not isinstance(each, nn.Parameter)
        ]

    def is_changed(self) -> bool:
        """Whether it reaches anything else now, or more."""
        return _marks(closure_of(self._function)) != (self._objects, self._numbers)

    def check(self) -> None:
        """Raise RuntimeError if a second forward would find anything of it replaced, or a tensor written to.

        What has only come is left aside, as in a list to which the program appends what each block returns.
        """
        objects, numbers = _marks(closure_of(self._function))
        there = set(objects)
        gone = [kind for kind, mark in self._objects if (kind, mark) not in there]
        if self._numbers - numbers:
            gone.append("number")
        if gone:
            raise RuntimeError(
                "backward runs the forward of a block a second time, as torch.utils.checkpoint does. But "
                f"a {gone[0]} that its function reads from a variable around it is another one than when the first "
                "began, so the second would compute something else. Pass it to the block as an argument"
            )
        for reference, version in self._versions:
            tensor = reference()
            if tensor is not None and version is not None and version_of(tensor) != version:
                raise modified("a tensor that the function of a block reads from a variable around it", tensor, version)


def _marks(closure: Closure) -> tuple[list[tuple[str, Hashable]], Counter[Hashable]]:
    """The modules and tensors that it reaches, by identity, and how often each plain number, string and the like."""
    objects: list[tuple[str, Hashable]] = [("module", identity_mark(each)) for each in closure.modules]
    objects += [("tensor", identity_mark(each)) for each in closure.tensors]
    return objects, Counter(mark_of_number(each) for each in closure.plain if type(each) in SCALARS)
