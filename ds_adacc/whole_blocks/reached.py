"""What the function of a call reaches by itself: a second forward must find that as it was (Rule E17).

A function that is made anew at each call reaches modules, tensors and numbers by the variables around it. What those
stand for may change before backward: in a loop, a `lambda` finds what its last round has put there.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from ds_adacc.program.replay import modified
from ds_adacc.python_state.closure import Closure, closure_of
from ds_adacc.python_state.content import SCALARS, mark_of_number
from ds_adacc.python_state.tensor_marks import version_of


class Reached:
    """What a function reaches now: in its variables, defaults and globals, and in the containers among them.

    It keeps none of that alive.
    """

    __slots__ = ("_function", "_numbers", "_objects", "_versions")

    def __init__(self, function: Callable[..., Any]) -> None:
        closure = closure_of(function)
        self._function = function
        self._objects = [
            ("module" if isinstance(each, nn.Module) else "tensor", weakref.ref(each)) for each in _objects(closure)
        ]
        self._numbers = _numbers(closure)
        self._versions = [
            (weakref.ref(each), version_of(each)) for each in closure.tensors if not isinstance(each, nn.Parameter)
        ]

    def is_changed(self) -> bool:
        """Whether it reaches anything else now, or more."""
        now = closure_of(self._function)
        objects, known = _objects(now), [reference() for _, reference in self._objects]
        is_same = len(objects) == len(known) and all(a is b for a, b in zip(objects, known, strict=True))
        return not is_same or _numbers(now) != self._numbers

    def check(self) -> None:
        """Raise RuntimeError if a second forward would find anything of it replaced, or a tensor written to.

        What has only come is left aside, as in a list to which the program appends what each block returns.
        """
        now = closure_of(self._function)
        objects = {id(each) for each in _objects(now)}
        gone = [kind for kind, reference in self._objects if (each := reference()) is None or id(each) not in objects]
        if self._numbers - _numbers(now):
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


def _objects(closure: Closure) -> list[nn.Module | torch.Tensor]:
    return [*closure.modules, *closure.tensors]


def _numbers(closure: Closure) -> Counter[Hashable]:
    """How often it reaches each plain number, string and the like."""
    return Counter(mark_of_number(each) for each in closure.plain if type(each) in SCALARS)
