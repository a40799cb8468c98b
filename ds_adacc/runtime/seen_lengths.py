"""The lengths at which each block was seen to run a program. Outside of them it may decide otherwise than its likes."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field

from ds_adacc.execute.block import Block
from ds_adacc.plan.symbolic_types import SymbolicType

Lengths = tuple[int, ...]

_MOST_WAYS = 64  # in which a block runs one program; a schedule makes new constants all the time
_MOST_ENDS = 256  # batches of about as many tokens each make ever new ones: none is larger in everything


@dataclass
class _Seen:
    """Between which lengths: all seen are at least some of the `least`, and at most some of the `greatest`.

    None of the least is at least another one, and none of the greatest at most another one. `examples`: how many the
    program had then.
    """

    examples: int
    least: list[Lengths] = field(default_factory=list)
    greatest: list[Lengths] = field(default_factory=list)

    def covers(self, lengths: Lengths) -> bool:
        return any(_at_most(one, lengths) for one in self.least) and any(
            _at_most(lengths, one) for one in self.greatest
        )

    def add(self, lengths: Lengths) -> None:
        if not any(_at_most(one, lengths) for one in self.least):
            self.least = [*(one for one in self.least if not _at_most(lengths, one)), lengths][-_MOST_ENDS:]
        if not any(_at_most(lengths, one) for one in self.greatest):
            self.greatest = [*(one for one in self.greatest if not _at_most(one, lengths)), lengths][-_MOST_ENDS:]


class SeenLengths:
    """The lengths at which blocks were seen, by program, block and way.

    A layer may compare its number with a constant, and a length with another one, as where all layers from the 20th on
    have a window. So each block is to be seen itself, unless it was seen where no length is greater, and where none is
    less. What it decides by a threshold, on a length or on a product of several, it then decides between them too.

    A `way` is all else by which Python may decide, and all of what it has decided that is no part of the program: which
    constants, say, a block computes with above a length. What was seen of one tells nothing of another.
    """

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[SymbolicType, weakref.WeakKeyDictionary[Block, dict[Hashable, _Seen]]]
        self._seen = weakref.WeakKeyDictionary()

    def cover(self, program: SymbolicType | None, block: Block, way: Hashable, lengths: Lengths) -> bool:
        """Whether the block was seen to run the program so at lengths at most these, and at lengths at least these.

        What was seen before the program had its latest example does not count: other numbers were predicted then.
        """
        seen = None if program is None else self._seen.get(program, {}).get(block, {}).get(way)
        return seen is not None and seen.examples == program.program.examples and seen.covers(lengths)

    def add(self, program: SymbolicType | None, block: Block, way: Hashable, lengths: Lengths) -> None:
        """Note that the block has run the program so at these lengths. None: the program is not known."""
        if program is None:
            return
        ways = self._seen.setdefault(program, weakref.WeakKeyDictionary()).setdefault(block, {})
        if len(ways) >= _MOST_WAYS and way not in ways:
            ways.clear()
        if way not in ways or ways[way].examples != program.program.examples:
            ways[way] = _Seen(program.program.examples)
        ways[way].add(lengths)


def _at_most(one: Lengths, other: Lengths) -> bool:
    """Whether none of the lengths is greater than the other's. Inputs that share a storage have more lengths."""
    return len(one) == len(other) and all(map(operator.le, one, other))
