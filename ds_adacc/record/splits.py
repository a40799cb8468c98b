"""The values that a block splits: autograd joins the gradients of all parts of a split in one step.

A slice is otherwise: each gets a gradient as large as the whole. So an operator's argument tells whether it is (a view
of) a part of a split. `torch.chunk` is a split, and a loop over a tensor unbinds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ds_adacc.program.arguments import ParameterRef, ValueRef
from ds_adacc.program.geometry import Geometry

_SPLITTING = (torch.ops.aten.split.Tensor, torch.ops.aten.split_with_sizes.default, torch.ops.aten.unbind.int)


def splits(func: object) -> bool:
    """Whether this function of the dispatcher's splits a tensor."""
    return func in _SPLITTING


class Splits:
    """The parts of each value that was split as a whole."""

    def __init__(self) -> None:
        self._parts: dict[int, Sequence[Geometry]] = {}

    def note(self, value: int, parts: Sequence[Geometry]) -> None:
        """Note a split of the whole value. Of one that is split twice, later arguments count as slices."""
        self._parts[value] = () if value in self._parts else parts

    def found(self, ref: ValueRef | ParameterRef) -> ValueRef | ParameterRef:
        """This reference, with the part of a split that it belongs to."""
        if not isinstance(ref, ValueRef):
            return ref
        parts = self._parts.get(ref.index, ())
        part = next((part for part in parts if ref.geometry.lies_in(part)), None)
        return ref if part is None else replace(ref, part=part)
