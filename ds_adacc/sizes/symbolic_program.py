"""A program with its sizes left open: what a recording would be at other sizes of the block's arguments.

A program that was recorded at several sizes tells which of its whole numbers (sizes, strides, offsets, arguments of
operators) follow the sizes of its arguments, and how. That is a guess until a recording at a further size confirms it.
Also then a call's hooks compare every saved tensor with what is predicted, as they do with what was recorded.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from ds_adacc.program.arguments import CONSTANTS, ParameterRef, ValueRef, extract_numbers, substitute_numbers
from ds_adacc.program.known_functions import length_bounds
from ds_adacc.program.recorded_op import RecordedOp
from ds_adacc.program.recording import Recording
from ds_adacc.program.signature import Sizes
from ds_adacc.python_state.tensor_marks import stride_of
from ds_adacc.sizes.formula import Variables

_MOST_MISTAKES = 3  # wrong predictions, after which no number is taken to decide nothing


@dataclass(frozen=True)
class Example:
    """A recording, and the sizes of the block's arguments in it."""

    sizes: Sizes
    recording: Recording

    @cached_property
    def opened(self) -> Recording:
        """The recording with a `LengthBound` in place of each that is a number among the block's arguments."""
        given, recording = self.sizes.numbers, self.recording
        pairs = [(_with_bounds(op, given), op.kwargs) for op in recording.ops]
        return replace(recording, ops=_with_arguments(recording.ops, pairs)) if given else recording

    @cached_property
    def skeleton(self) -> Hashable:
        """All that must be the same for two recordings to be of one program; None if no other one is of it."""
        return _skeleton(self.opened)


@dataclass(frozen=True)
class LengthBound:
    """Stands in a program for the whole number `number` of the block's arguments (`known_functions.length_bounds`)."""

    number: int


class SymbolicProgram:
    """One program at several sizes. `is_confirmed`: the latest example was as the earlier ones had predicted it.

    A number among the block's arguments may choose a branch, of which the saved tensors do not tell. So the program is
    predicted with those with which it was recorded at two sizes, and with those that bound lengths for fused attention,
    between the least and the greatest that were recorded. Any other may come once a recording with a new one has shown
    that it decides nothing. Except for bounds, a number may mean something else to each block: if the program
    `has_varied_numbers`, each block is to be seen to run as predicted.
    """

    def __init__(self, example: Example) -> None:
        self.is_confirmed = False
        self._independent: set[int] = set()  # the places of the numbers that were seen to decide nothing
        self._is_dependent = False  # whether any number was seen to decide something
        self._mistakes = 0
        self._sizes = [example.sizes]
        self._numbers = [_numbers(example.opened)]
        self._skeleton = example.skeleton
        self._ranges = [(number, number) for number in example.sizes.numbers]
        self._lengths_with: dict[tuple[int, ...], set[Hashable]] = {}
        self._note(example.sizes)
        bounds: list[LengthBound] = []
        extract_numbers((LengthBound,), self._skeleton, bounds)
        self._bounds = sorted({bound.number for bound in bounds})

    def is_of(self, example: Example) -> bool:
        """Whether the recording is this program, at whatever sizes."""
        is_alike = example.skeleton is not None and example.skeleton == self._skeleton
        return is_alike and self._has_as_many(example.sizes)

    @property
    def examples(self) -> int:
        """How many recordings its predictions are made from. A further one may change what is predicted."""
        return len(self._sizes)

    @property
    def varying(self) -> int:
        """How many sizes differ between the examples; those that always agree are one."""
        return len(Variables([known.lengths for known in self._sizes]).seen)

    def tells(self, sizes: Sizes, like: Example) -> bool:
        """Whether the program may run with the numbers among these sizes. `like` is the block's recording at others.

        Numbers may mean something else to each block, so its recording must be what the program is at its sizes.
        """
        if not self._has_as_many(sizes):
            return False
        if not sizes.numbers:
            return True
        is_like = self.is_of(like) and _numbers(like.opened) == self._predict(like.sizes)
        return is_like and self._may_have(sizes)

    def learn(self, example: Example) -> bool:
        """Learn from a recording at other sizes. Returns whether it is the same program."""
        if not self.is_of(example):
            return False
        numbers, before = _numbers(example.opened), list(zip(*self._lengths_with, strict=True))
        self._note(example.sizes)
        known = zip(self._sizes, self._numbers, strict=True)
        self._is_dependent |= any(_is_alike(sizes, example.sizes) and its != numbers for sizes, its in known)
        if example.sizes in self._sizes:
            return numbers == self._numbers[self._sizes.index(example.sizes)]
        self.is_confirmed = self._predict(example.sizes) == numbers
        if self.is_confirmed:
            given = enumerate(example.sizes.numbers)
            self._independent |= {place for place, number in given if number not in before[place]}
        else:
            self._sizes, self._numbers = [*self._sizes, example.sizes], [*self._numbers, numbers]
        return True

    def _note(self, sizes: Sizes) -> None:
        """Note that the program was recorded at these sizes."""
        self._lengths_with.setdefault(sizes.numbers, set()).add(sizes.lengths)
        self._ranges = [
            (min(low, number), max(high, number))
            for (low, high), number in zip(self._ranges, sizes.numbers, strict=True)
        ]

    def note_equal(self, sizes: Sizes, others: Sizes) -> None:
        """Note a recording at these sizes that is equal, but for constants, to an example, which has the others."""
        if not self._has_as_many(sizes):
            return
        self._note(sizes)
        pairs = enumerate(zip(sizes.numbers, others.numbers, strict=True))
        self._independent |= {place for place, (number, other) in pairs if number != other}

    def note_mistake(self) -> None:
        """A prediction was wrong. Nothing is predicted until a recording is as predicted, nor with any number."""
        self.is_confirmed, self._independent = False, set()
        self._mistakes += 1

    @property
    def has_varied_numbers(self) -> bool:
        """Whether other numbers than those that bound lengths have varied between recordings."""
        return any(map(self._has_varied, range(len(self._ranges))))

    def is_same(self, sizes: Sizes, others: Sizes) -> bool:
        """Whether these sizes differ from the others in nothing but numbers that decide nothing."""
        if not (_is_alike(sizes, others) and self._has_as_many(sizes) and self._has_as_many(others)):
            return sizes == others
        pairs = enumerate(zip(sizes.numbers, others.numbers, strict=True))
        return all(number == other or self._is_free(place) for place, (number, other) in pairs)

    def at(self, sizes: Sizes, like: Example) -> Recording | None:
        """What the recording of a block would be at these sizes. `like` is its recording at others.

        None if the examples do not tell. They do not where a tensor would have a negative size, as the last of a fixed
        number of chunks: the program is another one there.
        """
        may_be = self._may_have(sizes) and (self.is_confirmed or sizes in self._sizes)
        numbers = self._predict(sizes) if may_be else None
        if numbers is None:
            return None
        found = _with_numbers(like.opened, iter(numbers))
        return _closed(found, sizes.numbers) if _is_possible(found) else None

    def _predict(self, sizes: Sizes) -> list[int] | None:
        if sizes in self._sizes:
            return self._numbers[self._sizes.index(sizes)]
        variables = Variables([known.lengths for known in self._sizes])
        values = variables.values_at(sizes.lengths)
        if values is None:
            return None
        found = {}
        for column in set(zip(*self._numbers, strict=True)):
            formula = variables.fit(column)
            number = self._by_stride(column, sizes) if formula is None else formula.at(values)
            if number is None:
                return None
            found[column] = number
        return [found[column] for column in zip(*self._numbers, strict=True)]

    def _by_stride(self, column: tuple[int, ...], sizes: Sizes) -> int | None:
        """A number of the program that no formula of the lengths gives, at these sizes: one of a stride, if any does.

        `column`: the number in each example.
        """
        for its, stride in zip(zip(*(known.strides for known in self._sizes), strict=True), sizes.strides, strict=True):
            formula = Variables([(each,) for each in its]).fit(column)
            if formula is not None:
                return formula.at((stride,))
        return None

    def _has_as_many(self, sizes: Sizes) -> bool:
        """Whether there are as many of each among these sizes. Other blocks may be given more or fewer."""
        return list(map(len, sizes)) == list(map(len, self._sizes[0]))

    def _may_have(self, sizes: Sizes) -> bool:
        numbers, lengths = sizes.numbers, self._lengths_with.get(sizes.numbers, ())
        if len(lengths) > 1 or (sizes.lengths in lengths and self._mistakes < _MOST_MISTAKES):
            return True
        places = range(len(numbers))
        return all(self._is_known(place, numbers) or self._is_free(place) for place in places)

    def _is_known(self, place: int, numbers: Sequence[int]) -> bool:
        """Whether the number at this place has always been the same, or bounds lengths, and is as it was recorded."""
        low, high = self._ranges[place]
        is_alike = not self._has_varied(place) and (low == high or numbers[place] == numbers[self._first_like(place)])
        return is_alike and low <= numbers[place] <= high

    def _has_varied(self, place: int) -> bool:
        """Whether the number at this place has varied, and does more than bound lengths, or something else."""
        (low, high), same = self._ranges[place], self._first_like(place)
        return low < high and (same not in self._bounds or self._is_followed(same))

    def _is_free(self, place: int) -> bool:
        """Whether the number at this place has varied, and decides nothing."""
        may_be = place in self._independent and not self._is_dependent and self._mistakes < _MOST_MISTAKES
        return may_be and self._first_like(place) not in self._bounds and not self._is_followed(place)

    def _first_like(self, place: int) -> int:
        """The place of the first number that was the same as this one in all recordings."""
        columns = list(zip(*self._lengths_with, strict=True))
        return columns.index(columns[place])

    def _is_followed(self, place: int) -> bool:
        """Whether a whole number of the program varies just as the number at this place does."""
        column = tuple(known.numbers[place] for known in self._sizes)
        return len(set(column)) > 1 and column in set(zip(*self._numbers, strict=True))


def _is_alike(sizes: Sizes, others: Sizes) -> bool:
    """Whether they differ in nothing but numbers."""
    return sizes.lengths == others.lengths and sizes.strides == others.strides


def as_block(predicted: Recording, like: Recording) -> Recording:
    """The predicted program as the block of `like` runs it, whose parameters and buffers have the same roles.

    Where all operators are the same, it has those of the prediction, and with them what is known of each.
    """
    pairs = list(zip(predicted.ops, like.ops, strict=True))
    twin = predicted.of_block(like.name, like.parameters, like.buffers)
    # A Function may be another class in each block. (The text tells 0.0 from -0.0.)
    has_own = any(op.func is not its.func or op.python_reads is not its.python_reads for op, its in pairs)
    if not has_own and repr(predicted.constants) == repr(like.constants):
        return twin
    numbers = iter(like.constants)
    own = [replace(op, func=its.func, python_reads=its.python_reads) for op, its in pairs]
    ops = _with_arguments(own, [substitute_numbers(CONSTANTS, (op.args, op.kwargs), numbers) for op in own])
    twin = replace(twin, ops=ops)
    # To work these out takes a millisecond: blocks of one type share the digest, and the constants are the block's.
    vars(twin).update(digest=predicted.digest, constants=like.constants)
    return twin


def _with_bounds(op: RecordedOp, given: Sequence[int]) -> tuple[Any, ...]:
    """The operator's arguments; those that bound lengths and are among the `given` numbers become `LengthBound`s."""
    bounds = {i for i in length_bounds(op) if op.args[i] in given}
    return tuple(LengthBound(given.index(arg)) if i in bounds else arg for i, arg in enumerate(op.args))


def _is_possible(recording: Recording) -> bool:
    """Whether all its tensors may exist: no size, stride or distance is negative."""
    refs = (position.ref for position in recording.positions)
    geometries = [value.geometry for value in recording.values]
    geometries += [ref.geometry for ref in refs if isinstance(ref, ValueRef | ParameterRef)]
    return all(min((*each.size, *each.stride, each.start)) >= 0 for each in geometries)


def _closed(recording: Recording, given: Sequence[int]) -> Recording:
    """The recording with these numbers in place of its `LengthBound`s."""
    if not given:
        return recording
    arguments = tuple((op.args, op.kwargs) for op in recording.ops)
    bounds: list[LengthBound] = []
    extract_numbers((LengthBound,), arguments, bounds)
    closed = substitute_numbers((LengthBound,), arguments, iter([given[bound.number] for bound in bounds]))
    return replace(recording, ops=_with_arguments(recording.ops, closed)) if bounds else recording


def _numbers(recording: Recording) -> list[int]:
    """All whole numbers of the program that may follow the sizes of its inputs, in a fixed order."""
    found: list[int] = []
    extract_numbers((int,), _tree(recording), found)
    return found


def _skeleton(recording: Recording) -> Hashable:
    """All that must be the same for two recordings to be of one program: all but the sizes and the block's own.

    The block's own are its parameters and constants. None for a program that cannot be predicted: no two are the same.
    """
    # A value whose shape follows from data has no formula. A generator of its own belongs to one block.
    if any(value.dynamic for value in recording.values) or recording.generators:
        return None
    values = tuple(
        (v.index, v.origin, v.producer, v.output, v.source, v.requires_grad, v.overwritten, v.dynamic, v.role, v.device)
        for v in recording.values
    )
    ops = tuple(
        (op.name, op.outputs, op.refusal, op.detached, op.cached, op.draw and op.draw.position) for op in recording.ops
    )
    places = tuple((position.op, position.discarded) for position in recording.positions)
    without_constants = extract_numbers((int, *CONSTANTS), _tree(recording), [])
    return values, ops, places, recording.backward.structure, without_constants


def _tree(recording: Recording) -> Any:
    return (
        tuple((value.geometry, value.channels) for value in recording.values),
        tuple((op.args, op.kwargs) for op in recording.ops),
        tuple(position.ref for position in recording.positions),
        recording.backward.sizes,
    )


def _with_numbers(like: Recording, numbers: Iterator[int]) -> Recording:
    layouts, arguments, refs, sizes = substitute_numbers((int,), _tree(like), numbers)
    values = zip(like.values, layouts, strict=True)
    return replace(
        like,
        values=tuple(replace(value, geometry=geometry, channels=channels) for value, (geometry, channels) in values),
        ops=_with_arguments(like.ops, arguments),
        positions=tuple(replace(position, ref=ref) for position, ref in zip(like.positions, refs, strict=True)),
        backward=like.backward.with_sizes(sizes),
    )


def _with_arguments(ops: Sequence[RecordedOp], arguments: Sequence[tuple[Any, Any]]) -> tuple[RecordedOp, ...]:
    """The operators with other arguments."""
    changed: list[RecordedOp] = []
    for op, (args, kwargs) in zip(ops, arguments, strict=True):
        bases = tuple(replace(changed[base.index], refusal=base.refusal) for base in op.bases)
        changed.append(replace(op, args=args, kwargs=kwargs, bases=bases))
    return tuple(changed)


def fits(recording: Recording, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all arguments have the sizes and strides that the recording says."""
    return all(
        tensors[value.source].shape == value.geometry.size and stride_of(tensors[value.source]) == value.geometry.stride
        for value in recording.inputs
    )
