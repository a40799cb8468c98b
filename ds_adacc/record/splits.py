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
        self._slices: dict[int, list[Geometry]] = {}

    def note(self, value: int, views: Sequence[Geometry], is_split: bool) -> None:
        """Note the parts into which the whole value was split, or slices of it or of a slice.

        If it is split and also sliced, or split again, an argument does not tell which of the two it comes from. Then
        all that follow count as slices, which take more.
        """
        if is_split:
            parts, slices = (() if value in self._parts else views), self._slices.get(value, [])
        else:
            parts, slices = self._parts.get(value), views
            self._slices.setdefault(value, []).extend(views)
        if parts is not None:
            is_sliced = any(each.lies_in(part) for each in slices for part in parts)
            self._parts[value] = () if is_sliced else parts

    def found(self, ref: ValueRef | ParameterRef) -> ValueRef | ParameterRef:
        """This reference, with the part of a split that it belongs to."""
        if not isinstance(ref, ValueRef):
            return ref
        parts = self._parts.get(ref.index, ())
        part = next((part for part in parts if ref.geometry.lies_in(part)), None)
        return ref if part is None else replace(ref, part=part)
