"""Values that only pass through a replay: made in it, read in it, and freed before it ends.

Backward replays an op because someone asks for its output. Of what that takes, some is needed for nothing else: the
cosine product on the way to a rotated query, say. Autograd never saves such a value, and all that read it run for that
one output. So they run together, as one replay: that of the *exit*, the op that makes the output.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple


class Replayable(NamedTuple):
    """What backward may run again: the indices of the values that an op reads and makes, and whether it is proven."""

    inputs: Sequence[int]
    outputs: Sequence[int]
    replayable: bool


def rebuildable(ops: Sequence[Replayable], storable: Collection[int]) -> frozenset[int]:
    """The ops that can be replayed in backward: proven, and each of their inputs can be stored or rebuilt."""
    usable: set[int] = set()
    at_hand = set(storable)
    for index, op in enumerate(ops):
        if op.replayable and at_hand.issuperset(op.inputs):
            usable.add(index)
            at_hand.update(op.outputs)
    return frozenset(usable)


def passing(ops: Sequence[Replayable], storable: Collection[int], saved: Collection[int]) -> dict[int, int]:
    """By value that only passes through a replay, the exit of that replay.

    `ops` in forward order; `storable`: the values that the executor can hold; `saved`: those that backward asks for.
    """
    readers = _readers(ops, rebuildable(ops, storable), saved)
    exits: dict[int, int] = {}
    for index in reversed(range(len(ops))):  # what reads a value comes after what makes it
        used = [value for value in ops[index].outputs if value in readers or value in saved]
        if any(value in storable or value in saved for value in used):
            continue
        of_outputs = {_exit(ops, exits, reader) for value in used for reader in readers[value]}
        if len(of_outputs) == 1:
            exits.update(dict.fromkeys(used, of_outputs.pop()))
    return exits


def grouped(indices: Iterable[int], ops: Sequence[Replayable], exits: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """These ops, sorted, as replays: by the op at the end of each, all that run for it. `exits`: from `passing`."""
    replays: dict[int, list[int]] = {}
    for index in indices:
        replays.setdefault(_exit(ops, exits, index), []).append(index)
    return {end: tuple(parts) for end, parts in sorted(replays.items())}


def read_by(parts: Sequence[int], ops: Sequence[Replayable], exits: Mapping[int, int]) -> tuple[int, ...]:
    """The values, each once, that a replay of these ops reads and does not make itself."""
    read = dict.fromkeys(value for part in parts for value in ops[part].inputs)
    return tuple(value for value in read if value not in exits)


def _readers(ops: Sequence[Replayable], usable: Collection[int], saved: Collection[int]) -> dict[int, list[int]]:
    """By value, the ops that read it and may be replayed because someone asks for what they make."""
    readers: dict[int, list[int]] = {}
    for index in sorted(usable, reverse=True):
        if any(value in readers or value in saved for value in ops[index].outputs):
            for value in set(ops[index].inputs):
                readers.setdefault(value, []).append(index)
    return readers


def _exit(ops: Sequence[Replayable], exits: Mapping[int, int], index: int) -> int:
    """The exit of the replay that an op is part of."""
    return next((exits[value] for value in ops[index].outputs if value in exits), index)
