"""What Python has read of data while a block is recorded, and from where on another call may differ (Rule R7)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ds_adacc.program.arguments import ParameterRef, ValueRef
from ds_adacc.program.recorded_op import RecordedOp
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

    def __init__(self) -> None:
        self.data_read_at: str | None = None
        self.first_doubtful: int | None = None
        self.numbers = MadeOfNumbers()
        self._numbers_read: _NumbersRead | None = None

    @property
    def numbers_read_after(self) -> int | None:
        """How many operators had run when Python first read numbers that are no data; None: it has read none."""
        return None if self._numbers_read is None else self._numbers_read.ops

    def note_read(self, values: Iterable[ValueRef | ParameterRef | None], ops: list[RecordedOp], position: int) -> None:
        """Note that Python reads these values before the saved tensor number `position`. `ops`: the program so far."""
        if self.numbers.read(values, ops):
            self.note_data_read(position)
        elif self._numbers_read is None:
            self._numbers_read = _NumbersRead(line_of_block(), len(ops), position)

    def note_data_read(self, position: int) -> None:
        """Note that Python reads data before the saved tensor number `position`."""
        self.data_read_at = self.data_read_at or line_of_block()
        self.doubt_from(position)

    def doubt_from(self, position: int) -> None:
        """From this saved tensor on, another call may save other tensors."""
        if self.first_doubtful is None:
            self.first_doubtful = position

    def doubt_kept_numbers(self) -> int | None:
        """Take the numbers that Python has read for data if the program has kept one: a later call may read another.

        Returns the first operator that ran after the read; None if no number was kept.
        """
        if self._numbers_read is None or not self.numbers.keeps_read:
            return None
        line, ops, position = self._numbers_read
        self._numbers_read, self.data_read_at = None, line
        self.first_doubtful = position if self.first_doubtful is None else min(self.first_doubtful, position)
        return ops
