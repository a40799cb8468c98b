"""Values that are made of Python's numbers alone, as the capacity of experts is: they hold no data (Rule R7)."""

from __future__ import annotations

from typing import Any

import torch

from ds_adacc.program.arguments import ValueRef
from ds_adacc.program.recorded_op import RecordedOp
from ds_adacc.program.refusals import OF_TORCH

LIFT_FRESH = torch.ops.aten.lift_fresh.default  # torch calls it with each tensor that it has made of numbers or arrays
_DTYPES = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
_DTYPES |= {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}


def is_number(tensor: torch.Tensor) -> bool:
    """Whether a new tensor has one number of Python's, as `torch.tensor(2.0)` makes it.

    One of a list may have numbers of other tensors, which torch reads there without a call of the dispatcher. One with
    the memory of an array, as `torch.from_numpy` makes it, cannot be resized.
    """
    return tensor.dim() == 0 and tensor.dtype in _DTYPES and tensor.untyped_storage().resizable()


def call_for(number: torch.Tensor) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """An operator and arguments that make the same. The number is a constant of the program (Rule R8), as in x * 2."""
    return torch.ops.aten.scalar_tensor.default, (number.item(),), {"dtype": number.dtype, "device": number.device}


class MadeOfNumbers:
    """The values of a program that were made of numbers alone. They are the same in all calls of the program."""

    def __init__(self) -> None:
        self._producers: dict[int, int] = {}

    def note(self, op: RecordedOp) -> None:
        """Note what an operator has made, if it has read nothing but such values."""
        is_of_torch = getattr(op.func, "namespace", None) in OF_TORCH
        if is_of_torch and op.replayable and op.draw is None and not op.written and self._include(op.references):
            self._producers.update((index, op.index) for index in op.outputs if index is not None)

    def _include(self, references: Any) -> bool:
        return all(isinstance(ref, ValueRef) and ref.index in self._producers for ref in references)

    def producer(self, value: int) -> int | None:
        """The operator that has made the value; None if it may hold data."""
        return self._producers.get(value)
