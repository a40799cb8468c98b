"""Values that are made of Python's numbers alone, as the capacity of experts is: they hold no data (Rule R7)."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch

from ds_adacc.program.arguments import ParameterRef, ValueRef, references_in
from ds_adacc.program.recorded_op import RecordedOp
from ds_adacc.program.refusals import IN_PLACE, TAINTED, is_of_torch
from ds_adacc.record.executed_call import ExecutedCall

_FROM_FILE = "aten.from_file.default"  # the one operator of torch that reads something but tensors and numbers


def is_number(tensor: torch.Tensor) -> bool:
    """Whether a new tensor may have been made of one number of Python's, as `torch.tensor(2.0)` makes it.

    One of a list may have numbers of other tensors, which torch reads there without a call of the dispatcher. One with
    the memory of an array, as `torch.from_numpy` makes it, cannot be resized.
    """
    return tensor.dim() == 0 and tensor.untyped_storage().resizable()


class MadeOfNumbers:
    """The values of a program that were made of numbers alone. Whatever is read of them is no data.

    Those that torch has made of one number, and numbers that follow from these alone, count as tensors from outside of
    the block, and what computes them as no operators. As constants of the program, numbers that follow a length would
    make another program of each length.
    """

    def __init__(self, ops: Sequence[RecordedOp]) -> None:
        """`ops`: the program, where an operator is refused that gives other bits again."""
        self._ops = ops
        self._numbers: dict[int, list[weakref.ref[torch.Tensor]]] = {}  # the tensors of each, as the program has them
        self._doubtful: set[int] = set()  # the numbers that may hold data after all
        self._made_by: dict[int, int] = {}  # by value, the operator, if it is one
        self._from: dict[int, frozenset[int]] = {}  # by value, itself and all that it was made of
        self._read: frozenset[int] = frozenset()  # what all was made of that Python has read

    def add(self, number: int, tensor: torch.Tensor, made_of: Iterable[int] = (), is_doubtful: bool = False) -> None:
        """Note a number: `tensor`, as the program has it. `is_doubtful`: it may hold data."""
        self._numbers.setdefault(number, []).append(weakref.ref(tensor))
        self._from[number] = frozenset((number,)).union(*(self._from[each] for each in made_of))
        if is_doubtful:
            self._doubtful.add(number)

    def computed(self, ran: ExecutedCall) -> list[int] | None:
        """Of what numbers a call has computed others, if it has done nothing else; else None.

        It may write to them. It gives the same again.
        """
        references = list(references_in((ran.args, ran.kwargs)))
        indices = [ref.index for ref in references if isinstance(ref, ValueRef) and ref.index in self._numbers]
        is_drawn = torch.Tag.nondeterministic_seeded in getattr(ran.func, "tags", ())
        tensors = [output for output in ran.outputs if isinstance(output, torch.Tensor)]
        if not indices or len(indices) != len(references) or not is_of_torch(ran.func) or is_drawn:
            return None
        if ran.refusal not in (None, IN_PLACE, TAINTED) or ran.dynamic or any(each.dim() for each in tensors):
            return None
        return indices

    def note(self, op: RecordedOp) -> None:
        """Note what an operator has made, if it has read nothing but such values, or makes its numbers itself."""
        references = list(op.references)
        if not (is_of_torch(op.func) and op.replayable and op.draw is None and not op.written):
            return
        if all(map(self._includes, references)) and op.name != _FROM_FILE:
            for index in op.makes:
                self._made_by[index] = op.index
                self._from[index] = frozenset((index,)).union(*(self._from[ref.index] for ref in references))

    def read(self, references: Iterable[ValueRef | ParameterRef | None]) -> bool:
        """Note that Python reads these values. Returns whether that tells it of data."""
        found = list(references)
        if not found or not all(map(self._includes, found)):
            return True
        made_of = frozenset().union(*(self._from[ref.index] for ref in found if ref is not None))
        operators = (self._made_by[each] for each in made_of if each in self._made_by)
        if made_of & self._doubtful or not all(self._ops[each].replayable for each in operators):
            return True
        self._read |= made_of
        return False

    @property
    def keeps_read(self) -> bool:
        """Whether the program still has a number that Python has read, or of which it was made.

        It may be a result that a function keeps for later calls. Those read what it is then.
        """
        return any(reference() is not None for each in self._read for reference in self._numbers.get(each, ()))

    def _includes(self, reference: ValueRef | ParameterRef | None) -> bool:
        return isinstance(reference, ValueRef) and reference.index in self._from
