"""Values that are made of Python's numbers alone, as the capacity of experts is: they hold no data (Rule R7)."""

from __future__ import annotations

import torch

from ds_adacc.program.arguments import ValueRef, tensors_in
from ds_adacc.program.arguments import references as references_in
from ds_adacc.program.recorded_op import RecordedOp
from ds_adacc.program.refusals import OF_TORCH
from ds_adacc.record.executed_call import ExecutedCall

LIFT_FRESH = torch.ops.aten.lift_fresh.default  # torch calls it with each tensor that it has made of numbers or arrays
_FROM_NOTHING = {f"aten.{name}.default" for name in ("arange", "full", "ones", "zeros", "scalar_tensor", "eye")}
_FROM_NOTHING |= {"aten.arange.start", "aten.arange.start_step", "aten.linspace.default"}


def is_number(tensor: torch.Tensor) -> bool:
    """Whether a new tensor may have been made of one number of Python's, as `torch.tensor(2.0)` makes it.

    One of a list may have numbers of other tensors, which torch reads there without a call of the dispatcher. One with
    the memory of an array, as `torch.from_numpy` makes it, cannot be resized.
    """
    return tensor.dim() == 0 and tensor.untyped_storage().resizable()


class MadeOfNumbers:
    """The values of a program that were made of numbers alone. Whatever is read of them is no data.

    Those that torch has made of Python's numbers, and numbers that follow from these alone, count as tensors from
    outside of the block, and what computes them as no operators. As constants of the program, numbers that follow a
    length would make another program of each length.
    """

    def __init__(self) -> None:
        self._producers: dict[int, int | None] = {}  # by value, the operator that has made it

    def add(self, number: int) -> None:
        """Note a value that torch has made of a number, or computed of such values alone."""
        self._producers[number] = None

    def are_numbers(self, ran: ExecutedCall) -> bool:
        """Whether a call has computed numbers of such values alone. It has no effect, and gives the same again."""
        references = list(references_in((ran.args, tuple(value for _, value in ran.kwargs))))
        known = (isinstance(ref, ValueRef) and self._producers.get(ref.index, 0) is None for ref in references)
        is_of_torch = getattr(ran.func, "namespace", None) in OF_TORCH
        is_plain = ran.refusal is None and not (ran.written or ran.dynamic or ran.saved or ran.python_reads)
        is_drawn = torch.Tag.nondeterministic_seeded in getattr(ran.func, "tags", ())
        are_small = all(tensor.dim() == 0 for tensor in tensors_in(ran.outputs))
        return bool(references) and all(known) and is_of_torch and is_plain and not is_drawn and are_small

    def note(self, op: RecordedOp) -> None:
        """Note what an operator has made, if it has read nothing but such values, or makes its numbers itself."""
        references = list(op.references)
        is_of_numbers = all(isinstance(ref, ValueRef) and ref.index in self._producers for ref in references)
        is_of_torch = getattr(op.func, "namespace", None) in OF_TORCH
        if not (is_of_numbers and is_of_torch and op.replayable and op.draw is None and not op.written):
            return
        if references or op.name in _FROM_NOTHING:
            self._producers.update((index, op.index) for index in op.outputs if index is not None)

    def include(self, value: int, ops: list[RecordedOp]) -> bool:
        """Whether the value is one. `ops`: the program, where an operator is refused that gives other bits again."""
        producer = self._producers.get(value)
        return value in self._producers and (producer is None or ops[producer].replayable)
