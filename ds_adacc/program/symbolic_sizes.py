"""A program with its sizes left open: what a recording would be at other sizes of the block's arguments.

A program that was recorded at several sizes tells which of its whole numbers (sizes, strides, offsets, arguments of
operators) follow the sizes of its arguments, and how. That is a guess until a recording at a further size confirms it.
Also then a call's hooks compare every saved tensor with what is predicted, as they do with what was recorded.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ds_adacc.program.arguments import CONSTANTS, put, take
from ds_adacc.program.formula import Variables, fit
from ds_adacc.program.geometry import Geometry
from ds_adacc.program.recording import RecordedValue, Recording, with_arguments
from ds_adacc.program.signature import Sizes


@dataclass(frozen=True)
class Example:
    """A recording, and the sizes of the block's arguments in it."""

    sizes: Sizes
    recording: Recording


class SymbolicProgram:
    """One program at several sizes. `is_confirmed`: the latest example was as the earlier ones had predicted it."""

    def __init__(self, example: Example) -> None:
        self.examples = [_of_type(example)]
        self.is_confirmed = False
        self._numbers = [_numbers(example.recording)]
        self._skeleton = _skeleton(example.recording)

    def is_of(self, recording: Recording) -> bool:
        """Whether the recording is this program, at whatever sizes."""
        return _skeleton(recording) == self._skeleton

    def learn(self, example: Example) -> bool:
        """Learn from a recording at other sizes. Returns whether it is the same program."""
        if not self.is_of(example.recording):
            return False
        if any(known.sizes == example.sizes for known in self.examples):
            return True
        numbers = _numbers(example.recording)
        self.is_confirmed = self._predict(example.sizes) == numbers
        if not self.is_confirmed:
            self.examples, self._numbers = [*self.examples, _of_type(example)], [*self._numbers, numbers]
        return True

    def at(self, sizes: Sizes, like: Recording) -> Recording | None:
        """What the recording of a block would be at these sizes. `like` is its recording at others.

        None if the examples do not tell.
        """
        is_example = any(known.sizes == sizes for known in self.examples)
        numbers = self._predict(sizes) if is_example or self.is_confirmed else None
        return None if numbers is None else _with_numbers(like, iter(numbers))

    def _predict(self, sizes: Sizes) -> list[int] | None:
        for known, numbers in zip(self.examples, self._numbers, strict=True):
            if known.sizes == sizes:
                return numbers
        variables = Variables([known.sizes.all for known in self.examples])
        values = variables.of(sizes.all)
        columns = set(zip(*self._numbers, strict=True))
        if not values or not self._varying_arguments() <= columns:
            return None
        found = {}
        for column in columns:
            formula = fit(column, variables.seen)
            number = None if formula is None else formula.at(values)
            if number is None:
                return None
            found[column] = number
        return [found[column] for column in zip(*self._numbers, strict=True)]

    def _varying_arguments(self) -> set[tuple[int, ...]]:
        """The numbers among the arguments that vary, each in all examples.

        A number that no operator is given, such as one that counts steps, may decide which branch is taken.
        """
        each = zip(*(known.sizes.numbers for known in self.examples), strict=True)
        return {column for column in each if len(set(column)) > 1}


def _of_type(example: Example) -> Example:
    """The example without its block's own parameters, which must not outlive the block."""
    return replace(example, recording=example.recording.of_type())


def _numbers(recording: Recording) -> list[int]:
    """All whole numbers of the program that may follow the sizes of its inputs, in a fixed order."""
    found: list[int] = []
    take((int,), _tree(recording), found)
    return found


def _skeleton(recording: Recording) -> Hashable:
    """All that must be the same for two recordings to be of one program: all but the sizes and the block's own.

    The block's own are its parameters and constants.
    """
    values = tuple(
        (v.index, v.origin, v.producer, v.output, v.source, v.requires_grad, v.overwritten, v.dynamic, v.role, v.device)
        for v in recording.values
    )
    ops = tuple((op.name, op.outputs, op.refusal, op.draw and op.draw.position) for op in recording.ops)
    places = tuple((position.ops_done, position.fresh) for position in recording.positions)
    # A value whose shape follows from data has no formula. A generator of its own belongs to one block.
    is_alone = any(value.dynamic for value in recording.values) or recording.generators
    without_constants = take((int, *CONSTANTS), _tree(recording), [])
    return values, ops, places, without_constants, id(recording) if is_alone else None


def _tree(recording: Recording) -> Any:
    return (
        tuple((value.geometry, value.channels) for value in recording.values),
        tuple((op.args, op.kwargs) for op in recording.ops),
        tuple(position.ref for position in recording.positions),
    )


def _with_numbers(like: Recording, numbers: Iterator[int]) -> Recording:
    layouts, arguments, refs = put((int,), _tree(like), numbers)
    return replace(
        like,
        values=tuple(_value(value, *layout) for value, layout in zip(like.values, layouts, strict=True)),
        ops=with_arguments(like.ops, arguments),
        positions=tuple(replace(position, ref=ref) for position, ref in zip(like.positions, refs, strict=True)),
    )


def _value(value: RecordedValue, geometry: Geometry, channels: int) -> RecordedValue:
    return replace(value, geometry=geometry, channels=channels)


def fits(recording: Recording, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all arguments have the sizes and strides that the recording says."""
    return all(
        tensors[value.source].shape == value.geometry.size and tensors[value.source].stride() == value.geometry.stride
        for value in recording.values
        if value.origin == "input"
    )
