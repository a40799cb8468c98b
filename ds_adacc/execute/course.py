"""How calls of a recorded program run under a policy: what the pack hook does at each position, what is replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ds_adacc.execute.copied_for_backward import copied
from ds_adacc.planner import Policy, Segment, is_codec
from ds_adacc.program.arguments import ParameterRef, ValueRef
from ds_adacc.program.geometry import Geometry
from ds_adacc.program.recorded_op import Draw
from ds_adacc.program.recording import RecordedValue, Recording


@dataclass(frozen=True, slots=True)
class FirstSave:
    """What the pack hook does where a call saves a value for the first time. The saved tensor may be a part of it."""

    root: Geometry  # the whole value, seen from the saved tensor
    is_part: bool  # the value reaches beyond the saved tensor
    again: bool  # the value is saved at later positions too
    fill: bool  # give the holder the value here
    hold: bool  # the value will be rebuilt or compressed later: until then its holder keeps it
    taken: Geometry | None  # the part that the holder is given, seen from the saved tensor; None: that tensor itself
    detaches: bool  # the holder may keep what it is given, so that must not be part of the autograd graph

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage has room for the whole value of which `tensor` should be a part."""
        start = tensor.storage_offset() * tensor.element_size() + self.root.start
        return start >= 0 and start + self.root.span <= tensor.untyped_storage().nbytes()


@dataclass(frozen=True, slots=True)
class Instruction:
    """What the pack hook expects at one position, and what it does with it.

    `value`: the index of the value that is saved; or `parameter`: what is saved of a parameter. With neither, it is
    retained.
    `size`, `stride`, `dtype`: what the tensor must look like (Rule E3).
    `view`: the tensor's geometry in the value; None: it is the whole value. `start`: its distance in bytes from the
    first byte of the value or the parameter. `first`: what is done besides if the call has not met the value yet.
    `states`: the random generators whose states are noted here, each with the value that holds its state.
    `release`: the values to be rebuilt that need not be kept any longer, since all their sources are saved (Rule E4).
    `copy`: backward gets a copy of the tensor (`copied_for_backward.py`). `discarded`: the block discards the output
    for which this is saved, so it is only retained.

    One class for all positions: the hook reads fields of one class faster than those of several.
    """

    value: int | None = None
    parameter: ParameterRef | None = None
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    view: Geometry | None = None
    start: int = 0
    first: FirstSave | None = None
    release: tuple[int, ...] = ()
    states: tuple[tuple[int, torch.Generator], ...] = ()
    copy: bool = False
    discarded: bool = False


@dataclass(frozen=True)
class Course:
    """How calls of one program run under one policy, whichever block they are of.

    `instructions`: by position of the pack hook; `first` and `last`: the first and the last position for which backward
    asks. `order`: the values with a holder, sources first (Rule E10). `inputs`: those of them that exist before the
    forward, each with the geometry of what its holder is given; None: the tensor itself. `segments`: what backward
    replays, by the operator at the end of each. `uses`: how often backward asks for each value. `first_states`: the
    random generators whose states are noted when the call begins, each with the value that holds its state.
    `until_confirmed`: the values to be rebuilt or compressed that are kept until the forward has ended: only then it is
    known which graphs of torch.compile have run (Rule R17).
    """

    instructions: tuple[Instruction, ...]
    first: int
    last: int
    order: tuple[int, ...]
    segments: Mapping[int, Segment]
    uses: Mapping[int, int]
    inputs: tuple[tuple[int, Geometry | None], ...]
    first_states: tuple[tuple[int, torch.Generator], ...]
    until_confirmed: tuple[int, ...]


def course_of(recording: Recording, policy: Policy) -> Course:
    """How calls of the recorded program run under `policy`."""
    return _CourseMaker(recording, policy).course()


def states_at(draws: Iterable[Draw]) -> dict[int, dict[int, torch.Generator]]:
    """Which states of generators are noted at each call of the pack hook, and at the beginning of the block, -1.

    For each of them, the generators by the values that hold their states.
    """
    states: dict[int, dict[int, torch.Generator]] = {}
    for draw in draws:
        states.setdefault(draw.position - 1, {})[draw.before.index] = draw.generator
        states.setdefault(draw.position, {})[draw.after.index] = draw.generator
    return states


def flat(value: RecordedValue) -> Geometry:
    """How codecs see the value's memory: the geometry of (rows, channels)."""
    rows = value.geometry.numel // value.channels if value.channels else 0
    return Geometry((rows, value.channels), (value.channels, 1), value.geometry.dtype, 0)


class _CourseMaker:
    """Makes the course of a program under a policy."""

    def __init__(self, recording: Recording, policy: Policy) -> None:
        self._recording = recording
        self._stores = policy.stores
        replayed = recording.segments.replayed(policy.stores)
        self._segments = recording.segments.of(replayed)
        self._uses = self._count_uses()
        self._order = self._find_order()
        self._states = states_at([draw for op in replayed for draw in recording.ops[op].draws])
        self._copies = copied(recording, replayed)
        self._first: dict[int, int] = {}  # by value, the first position at which it is saved, and the last
        self._last: dict[int, int] = {}
        for number, position in enumerate(recording.positions):
            if position.value is not None:
                self._first.setdefault(position.value, number)
                self._last[position.value] = number
        self._ready = self._find_ready()
        self._release: dict[int, list[int]] = {}  # by position, the values that are held until then
        for index, number in self._ready.items():
            if number > self._first.get(index, number) or number == len(recording.positions):
                self._release.setdefault(number, []).append(index)

    def course(self) -> Course:
        positions, values = len(self._recording.positions), map(self._recording.values.__getitem__, self._order)
        asked = [number for number, position in enumerate(self._recording.positions) if not position.discarded]
        return Course(
            instructions=tuple(map(self._instruction, range(positions))),
            first=min(asked, default=0),
            last=max(asked, default=positions - 1),
            order=self._order,
            segments=self._segments,
            uses=self._uses,
            inputs=tuple((v.index, self._taken(v, v.geometry)) for v in values if v.is_given),
            first_states=tuple(self._states.get(-1, {}).items()),
            until_confirmed=tuple(self._release.get(positions, ())),
        )

    def _count_uses(self) -> Counter[int]:
        uses = Counter(p.value for p in self._recording.positions if p.value is not None)
        for segment in self._segments.values():
            uses.update(segment.inputs)
        return uses

    def _find_order(self) -> tuple[int, ...]:
        """The values with a holder, sources first (Rule E10): inputs have the lowest indices, outputs follow."""
        return tuple(
            value.index
            for value in self._recording.values
            if self._uses.get(value.index)
            and (self._stores[value.index] is not None or value.producer in self._segments)
        )

    def _find_ready(self) -> dict[int, int]:
        """For each rebuilt value, the position after which everything that it is rebuilt from is saved (Rule E4).

        Once compiled code has run, two kinds of values wait until the forward ends: rebuilt ones that are saved from
        then on, and compressed ones that are saved from then on or given to the block (its caller holds these anyway).
        """
        ready: dict[int, int] = {}
        noted = {index: number for number, indices in self._states.items() for index in indices}
        first, saved_at, end = {**self._first, **noted}, dict[int, int](), len(self._recording.positions)
        is_compiled, compiled_from = self._recording.runs_compiled, self._recording.compiled_from or 0
        for index in self._order:
            value = self._recording.values[index]
            if (store := self._stores[index]) is not None:
                saved_at[index] = -1 if value.is_given else first[index]
                if is_compiled and is_codec(store) and (value.is_given or saved_at[index] >= compiled_from):
                    ready[index] = end
            elif value.producer is not None:  # it is rebuilt
                inputs = self._segments[value.producer].inputs
                saved_at[index] = ready[index] = max((saved_at[i] for i in inputs), default=-1)
                if is_compiled and max(first.get(index, -1), ready[index]) >= compiled_from:
                    ready[index] = end  # another graph may save more tensors or fewer: then all after it is another one
        return ready

    def _instruction(self, number: int) -> Instruction:
        position = self._recording.positions[number]
        ref = position.ref
        always = {
            "release": tuple(self._release.get(number, ())),
            "states": tuple(self._states.get(number, {}).items()),
            "copy": number in self._copies,
        }
        if position.discarded:
            return Instruction(parameter=ref if isinstance(ref, ParameterRef) else None, discarded=True, **always)
        if ref is None or (isinstance(ref, ValueRef) and ref.index not in self._order):
            return Instruction(**always)
        seen = ref.geometry
        look = {"size": seen.size, "stride": seen.stride, "dtype": seen.dtype, "start": seen.start}
        if isinstance(ref, ParameterRef):
            return Instruction(parameter=ref, **look, **always)
        value = self._recording.values[ref.index]
        is_first = self._first[ref.index] == number and not value.is_given
        return Instruction(
            value=ref.index,
            **look,
            view=None if seen == value.geometry else seen,
            first=self._first_save(value, seen, number) if is_first else None,
            **always,
        )

    def _first_save(self, value: RecordedValue, seen: Geometry, number: int) -> FirstSave:
        store, root = self._stores[value.index], value.geometry.seen_from(seen)
        hold = self._ready.get(value.index, -1) > number
        fill = store is not None and not hold
        return FirstSave(
            root=root,
            is_part=root.start < 0 or root.start + root.span > seen.span,
            again=self._last[value.index] > number,
            fill=fill,
            hold=hold,
            taken=self._taken(value, seen) if fill or hold else None,
            detaches=hold or (fill and not is_codec(store)),
        )

    def _taken(self, value: RecordedValue, seen: Geometry) -> Geometry | None:
        """The geometry, seen from a tensor, of what the value's holder is given; None if that is the tensor itself."""
        is_compressed = is_codec(self._stores[value.index])
        held = flat(value) if is_compressed else value.geometry
        if seen == held:
            return None
        is_flat = seen.is_contiguous and seen.numel == held.numel and seen.dtype is held.dtype
        if is_flat and seen.size[-1:] == held.size[-1:] and is_compressed:
            return None
        return held.seen_from(seen)
