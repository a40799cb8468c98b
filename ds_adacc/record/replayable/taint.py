"""What Python has read of data while a block is recorded, and from where on another call may differ (Rule R7)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ds_adacc.program.arguments import ParameterRef, ValueRef
from ds_adacc.program.recorded_op import RecordedOp
from ds_adacc.program.recording import Position
from ds_adacc.program.refusals import TAINTED
from ds_adacc.record.frames import line_of_block
from ds_adacc.record.replayable.made_of_numbers import MadeOfNumbers


class _NumbersRead(NamedTuple):
    """Where Python first reads a tensor that was made of numbers alone: the line, and what has come by then."""

    line: str
    ops: int
    positions: int


class Taint:
    """Where Python has first read data. From then on any number may hold some of it.

    `data_read_at`: the line; None: it has read none. `first_doubtful`: the first position that another call may not
    have; None: all calls have all. `numbers`: the values that hold no data, whatever is read of them.
    """

    def __init__(self, ops: list[RecordedOp], positions: Sequence[Position]) -> None:
        """`ops`, `positions`: the program, which grows while the block runs."""
        self._ops = ops
        self._positions = positions
        self.data_read_at: str | None = None
        self.first_doubtful: int | None = None
        self.numbers = MadeOfNumbers(ops)
        self._numbers_read: _NumbersRead | None = None

    @property
    def is_there(self) -> bool:
        """Whether Python has read data, so that any later number may hold some of it."""
        return self.data_read_at is not None

    @property
    def numbers_read_after(self) -> int | None:
        """How many operators had run when Python first read numbers that are no data; None: it has read none."""
        return None if self._numbers_read is None else self._numbers_read.ops

    def note_read(self, values: Iterable[ValueRef | ParameterRef | None]) -> None:
        """Note that Python reads these values."""
        if self.numbers.read(values):
            self.note_data_read()
        elif self._numbers_read is None:
            self._numbers_read = _NumbersRead(line_of_block(), len(self._ops), len(self._positions))

    def note_data_read(self) -> None:
        """Note that Python may know data from here on."""
        self.data_read_at = self.data_read_at or line_of_block()
        self.doubt_from_here()

    def doubt_from_here(self) -> None:
        """From here on, another call may save other tensors."""
        if self.first_doubtful is None:
            self.first_doubtful = len(self._positions)

    def doubt_kept_numbers(self) -> None:
        """Take the numbers that Python has read for data if the program has kept one: a later call may read another."""
        if self._numbers_read is None or not self.numbers.keeps_read:
            return
        line, ops, position = self._numbers_read
        self._numbers_read, self.data_read_at = None, line
        self.first_doubtful = position if self.first_doubtful is None else min(self.first_doubtful, position)
        self._ops[ops:] = [op if op.refusal else replace(op, refusal=TAINTED) for op in self._ops[ops:]]
