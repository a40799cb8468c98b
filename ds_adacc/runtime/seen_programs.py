"""Predicted programs that blocks were seen to run, and at which lengths: which calls need not be followed."""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from ds_adacc.execute.block import Block
from ds_adacc.execute.incoming import Incoming
from ds_adacc.execute.variant import Variant
from ds_adacc.program.signature import apart
from ds_adacc.python_state.covered import covered_by
from ds_adacc.python_state.guards import Guards
from ds_adacc.python_state.identity import identity_mark, without_identity
from ds_adacc.sizes.symbolic_types import SymbolicType
from ds_adacc.steps.step_controller import StepController

Lengths = tuple[int, ...]

_MOST = 4096  # each combination of input sizes is one
_MOST_CONTEXTS = 64  # of a block that runs one program; a schedule makes new constants all the time
_MOST_ENDS = 256  # batches of about as many tokens each make ever new ones: none is larger in everything


class SeenPrograms:
    """Tells of a call with a predicted program whether its block, or one like it, was seen to run that program.

    A program is known by its block type, and by what Python may have decided by: the block's marks and its arguments.
    Two layers may run one program up to a length, and from there on two, as where a window is set for one of them.
    Only what tells which layer it is has no part in it: its modules and parameters, and the number that counts layers.
    Where that number may decide, each block is to be seen itself (`SeenLengths`). So it is where numbers among the
    arguments vary, which may mean something else to each block.

    When there are too many programs, all are forgotten: a block is then followed once more.
    """

    def __init__(self, controller: StepController) -> None:
        self._controller = controller
        self._seen: set[Hashable] = set()
        self._seen_lengths = SeenLengths()
        self._marks: weakref.WeakKeyDictionary[Block, tuple[Any, Hashable]] = weakref.WeakKeyDictionary()

    def has_seen(self, incoming: Incoming, variant: Variant) -> bool:
        """Whether the block needs not be followed in this call, whose program is predicted to be the variant's."""
        if variant.has_varied_numbers or self._key(incoming, variant) not in self._seen:
            return False
        return self._seen_lengths.cover(*self._context(incoming, variant))

    def add(self, incoming: Incoming, variant: Variant) -> None:
        """Note that the call has run the program of the variant."""
        self._seen_lengths.add(*self._context(incoming, variant))
        if not variant.has_varied_numbers:
            key = self._key(incoming, variant)
            if len(self._seen) >= _MOST and key not in self._seen:
                self._seen.clear()
            self._seen.add(key)

    def _context(self, incoming: Incoming, variant: Variant) -> tuple[SymbolicType | None, Block, Hashable, Lengths]:
        """What `SeenLengths` asks for."""
        recording, block = variant.recording, incoming.block
        program = self._controller.planning.new_sizes.symbolic_types.of(variant.digest)
        others, lengths = apart(incoming.signature)
        parameters = tuple(map(identity_mark, recording.parameters))
        context = recording.constants, parameters, tuple(recording.buffers), others, self._marks_of(incoming)
        return program, block, context, lengths

    def _key(self, incoming: Incoming, variant: Variant) -> Hashable:
        """Names the program as this block runs it in this call.

        Its constants count, which are no part of its digest: a block that was recorded may compute them from the size,
        and another one may be predicted with those of a smaller size.
        """
        recording, block = variant.recording, incoming.block
        arguments = incoming.signature._replace(tensors=None)
        return recording.digest, recording.constants, block.kind, arguments, self._marks_of(incoming)

    def _marks_of(self, incoming: Incoming) -> Hashable:
        block, guards = incoming.block, incoming.guards
        readings = (each.last_reading for each in self._controller.blocks.all() if each.kind == block.kind)
        alike = [reading.marks for reading in readings if reading is not None]
        of = (guards, len(alike))
        known = self._marks.get(block)
        if known is None or known[0] != of:
            known = self._marks[block] = of, _marks(guards, alike)
        return known[1]


def _marks(guards: Guards, of_all: Sequence[Guards]) -> Hashable:
    """What of these marks tells blocks apart. `of_all`: those of all blocks of the kind."""
    marks = {name: mark for name, mark in guards.items() if not _is_wrapper(mark)}
    return tuple([(name, without_identity(mark)) for name, mark in marks.items() if not _counts(name, mark, of_all)])


def _is_wrapper(mark: Hashable) -> bool:
    """Whether it is that of the forward which `wrap` has put on a block: each has its own."""
    forward = mark() if isinstance(mark, weakref.ref) else None
    return isinstance(forward, types.FunctionType) and covered_by(forward) is not None


def _counts(name: str, mark: Hashable, of_all: Sequence[Mapping[str, Hashable]]) -> bool:
    """Whether this mark is a number that counts the layers: in all of them together it has consecutive values."""
    if not _is_int(mark) or len(of_all) < 2:
        return False
    numbers = sorted(other[1] for other in (each.get(name) for each in of_all) if _is_int(other))
    return len(numbers) == len(of_all) and numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def _is_int(mark: Hashable) -> TypeGuard[tuple[type[int], int]]:
    return type(mark) is tuple and len(mark) == 2 and mark[0] is int


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
    """The lengths at which blocks were seen, by program, block and context.

    A layer may compare its number with a constant, and a length with another one, as where all layers from the 20th on
    have a window. So each block is to be seen itself, unless it was seen where no length is greater, and where none is
    less. What it decides by a threshold, on a length or on a product of several, it then decides between them too.

    A `context` is all else by which Python may decide, and all of what it has decided that is no part of the program:
    which constants, say, a block computes with above a length. What was seen of one tells nothing of another.
    """

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[SymbolicType, weakref.WeakKeyDictionary[Block, dict[Hashable, _Seen]]]
        self._seen = weakref.WeakKeyDictionary()

    def cover(self, program: SymbolicType | None, block: Block, context: Hashable, lengths: Lengths) -> bool:
        """Whether the block was seen to run the program so at lengths at most these, and at lengths at least these.

        What was seen before the program had its latest example does not count: other numbers were predicted then.
        """
        if program is None:
            return False
        seen = self._seen.get(program, {}).get(block, {}).get(context)
        return seen is not None and seen.examples == program.program.examples and seen.covers(lengths)

    def add(self, program: SymbolicType | None, block: Block, context: Hashable, lengths: Lengths) -> None:
        """Note that the block has run the program so at these lengths. None: the program is not known."""
        if program is None:
            return
        contexts = self._seen.setdefault(program, weakref.WeakKeyDictionary()).setdefault(block, {})
        if len(contexts) >= _MOST_CONTEXTS and context not in contexts:
            contexts.clear()
        if context not in contexts or contexts[context].examples != program.program.examples:
            contexts[context] = _Seen(program.program.examples)
        contexts[context].add(lengths)


def _at_most(one: Lengths, other: Lengths) -> bool:
    """Whether none of the lengths is greater than the other's. Inputs that share a storage have more lengths."""
    return len(one) == len(other) and all(map(operator.le, one, other))
