"""The lengths at which each block was seen to run a program. Outside of them it may decide otherwise than its likes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

from ds_adacc.execute.block import Block
from ds_adacc.plan.symbolic_types import SymbolicType


class _Seen(NamedTuple):
    """At which lengths, from the least to the greatest; and how many examples the program had then."""

    ranges: list[range]
    examples: int


class SeenLengths:
    """The least and the greatest of each length, by program and block.

    A layer may compare its number with a constant, and a length with another one, as where all layers from the 20th on
    have a window. So each block is to be seen itself where a length is less or greater than all before: there are few.
    """

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[SymbolicType, weakref.WeakKeyDictionary[Block, _Seen]]
        self._seen = weakref.WeakKeyDictionary()

    def cover(self, program: SymbolicType | None, block: Block, lengths: Sequence[int]) -> bool:
        """Whether the block was seen to run the program at lengths at most these, and at least these.

        What was seen before the program had its latest example does not count: other numbers were predicted then.
        """
        ranges = None if program is None else self._ranges(program, block, lengths)
        return ranges is not None and all(length in seen for length, seen in zip(lengths, ranges, strict=True))

    def add(self, program: SymbolicType | None, block: Block, lengths: Sequence[int]) -> None:
        """Note that the block has run the program at these lengths. None: the program is not known."""
        if program is None:
            return
        before = self._ranges(program, block, lengths) or [range(length, length + 1) for length in lengths]
        ranges = [
            range(min(seen.start, length), max(seen.stop, length + 1))
            for length, seen in zip(lengths, before, strict=True)
        ]
        of_blocks = self._seen.setdefault(program, weakref.WeakKeyDictionary())
        of_blocks[block] = _Seen(ranges, program.program.examples)

    def _ranges(self, program: SymbolicType, block: Block, lengths: Sequence[int]) -> list[range] | None:
        """None if nothing is known. Other calls of the block may share storages among their inputs: more lengths."""
        seen = self._seen.get(program, {}).get(block)
        if seen is None or seen.examples != program.program.examples or len(seen.ranges) != len(lengths):
            return None
        return seen.ranges
