"""Segments: the ops that backward replays together.

Backward replays an op because someone asks for its output. Of what that takes, some is needed for nothing else: the
cosine product on the way to a rotated query, say. Autograd never saves such a value, and all that read it run for that
one output. So they run together, in the segment of the *exit*, the op that makes the output. The value only *passes*
through the replay: it is made in it, read in it, and freed before it ends.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ds_adacc.planner.units import Bytes, Guarantee


@dataclass(frozen=True)
class Op:
    """One recorded operator: `inputs` and `outputs` are indices of values.

    `replayable`: a replay was proven to give the same bits. `workspace_bytes`: what a replay allocates besides its
    outputs.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    replayable: Guarantee
    workspace_bytes: Bytes = 0


@dataclass(frozen=True)
class Segment:
    """Ops that one replay runs, in forward order. The last one makes what is asked for.

    `inputs`: the values, each once, that it reads and does not make itself. `last_readers`: by value that passes
    through it, the op that reads the value last.
    """

    ops: tuple[int, ...]
    inputs: tuple[int, ...]
    last_readers: Mapping[int, int]


class Segments:
    """Which ops of a block backward may replay, and which of them together.

    `ops` in forward order; `storable`: the values that the executor can hold; `saved`: those that backward asks for.
    """

    def __init__(self, ops: Sequence[Op], storable: Collection[int], saved: Collection[int]) -> None:
        self.ops = ops
        self._storable = storable
        self._saved = saved

    @functools.cached_property
    def rebuildable(self) -> frozenset[int]:
        """The ops that can be replayed in backward: proven, and each of their inputs can be stored or rebuilt."""
        usable: set[int] = set()
        at_hand = set(self._storable)
        for index, op in enumerate(self.ops):
            if op.replayable and at_hand.issuperset(op.inputs):
                usable.add(index)
                at_hand.update(op.outputs)
        return frozenset(usable)

    def replayed(self, stores: Sequence[str | None]) -> tuple[int, ...]:
        """The ops that backward replays, sorted: those that make what it needs and `stores` does not hold.

        `stores`: by value, what is stored of it; None: nothing.
        """
        replayed: set[int] = set()
        needed = [*self._saved]
        while needed:
            value = needed.pop()
            producer = self._producers.get(value)
            if stores[value] is None and producer is not None and producer not in replayed:
                replayed.add(producer)
                needed += self.ops[producer].inputs
        return tuple(sorted(replayed))

    @functools.cached_property
    def _producers(self) -> Mapping[int, int]:
        """The ops by the values that they make."""
        return {value: index for index, op in enumerate(self.ops) for value in op.outputs}

    @functools.cached_property
    def readers(self) -> Mapping[int, Sequence[int]]:
        """By value, the ops that read it and may be replayed because someone asks for what they make."""
        readers: dict[int, list[int]] = {}
        for index in sorted(self.rebuildable, reverse=True):
            if any(value in readers or value in self._saved for value in self.ops[index].outputs):
                for value in set(self.ops[index].inputs):
                    readers.setdefault(value, []).append(index)
        return readers

    @functools.cached_property
    def passing(self) -> Mapping[int, int]:
        """By value that only passes through a replay, the exit of its segment."""
        readers, exits = self.readers, dict[int, int]()
        for op in reversed(self.ops):  # backwards: readers are visited before makers
            used = [value for value in op.outputs if value in readers or value in self._saved]
            if any(value in self._storable or value in self._saved for value in used):
                continue
            of_outputs = {self._exit(reader, exits) for value in used for reader in readers[value]}
            if len(of_outputs) == 1:
                exits.update(dict.fromkeys(used, of_outputs.pop()))
        return exits

    def of(self, indices: Iterable[int]) -> dict[int, Segment]:
        """These ops, sorted, in segments, by the exit of each."""
        found: dict[int, list[int]] = {}
        for index in indices:
            found.setdefault(self._exit(index, self.passing), []).append(index)
        return {end: self._segment(tuple(ops)) for end, ops in sorted(found.items())}

    def _segment(self, ops: tuple[int, ...]) -> Segment:
        read = {value: index for index in ops for value in self.ops[index].inputs}
        inputs = tuple(value for value in read if value not in self.passing)
        return Segment(ops, inputs, {value: index for value, index in read.items() if value in self.passing})

    def _exit(self, index: int, exits: Mapping[int, int]) -> int:
        """The exit of the segment that an op is part of."""
        return next((exits[value] for value in self.ops[index].outputs if value in exits), index)
