"""How calls of a recorded program run under a policy: what the pack hook does at each position, what is replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from ds_adacc.execute.copied import copied
from ds_adacc.planner import RETAIN, Policy, Segment, is_codec
from ds_adacc.program.arguments import ParameterRef, ValueRef
from ds_adacc.program.geometry import Geometry
from ds_adacc.program.recording import Draw, RecordedValue, Recording


@dataclass(frozen=True, slots=True)
class Instruction:
    """What the pack hook expects at one position, and what it does with it.

    `value`: the index of the value that is saved; or `parameter`: that of the parameter. With neither, it is retained.
    `size`, `stride`, `dtype`: what the tensor must look like (Rule E3).
    `view`: the tensor's geometry in the value (None: it is the whole value) or in the parameter; `start`: its distance
    in bytes from the first byte there. `root`: the value's own geometry seen from the tensor, at its first position
    only. `is_part`: at that position, the value reaches beyond the tensor.
    `states`: the random generators whose states are noted here, each with the value that holds its state.
    `again`: this is the first of several positions of the value. `fill`: the holder is filled here. `taken`: the
    geometry of what it is given, seen from the tensor; None: the tensor itself. `keeps`: the holder keeps that, so the
    storage lives as long as the call. `detaches`: it may keep that, so that must not be part of the autograd graph.
    `hold`: the value will be rebuilt or compressed, but must be kept for now; `release`: the values to be rebuilt that
    need not be kept any longer, since all their sources are saved (Rule E4). `copy`: backward gets a copy of it
    (`copied.py`).
    """

    value: int | None = None
    parameter: int | None = None
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    view: Geometry | None = None
    root: Geometry | None = None
    start: int = 0
    is_part: bool = False
    again: bool = False
    fill: bool = False
    taken: Geometry | None = None
    keeps: bool = False
    detaches: bool = False
    hold: bool = False
    release: tuple[int, ...] = ()
    states: tuple[tuple[int, torch.Generator], ...] = ()
    copy: bool = False

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage has room for the whole value of which `tensor` should be a part."""
        first = tensor.storage_offset() * tensor.element_size() - self.start
        return first >= 0 and first + self.root.span <= tensor.untyped_storage().nbytes()


@dataclass(frozen=True)
class Course:
    """How calls of one program run under one policy, whichever block they are of.

    `instructions`: by position of the pack hook. `order`: the values with a holder, sources first (Rule E10). `inputs`:
    those of them that exist before the forward, each with the geometry of what its holder is given; None: the tensor
    itself. `segments`: what backward replays, by the operator at the end of each. `uses`: how often backward asks for
    each value. `first_states`: the random generators whose states are noted when the call begins, each with the value
    that holds its state. `until_confirmed`: the values to be rebuilt or compressed that are kept until the forward has
    ended: only then it is known which graphs of torch.compile have run (Rule R17).
    """

    instructions: tuple[Instruction, ...]
    order: tuple[int, ...]
    segments: Mapping[int, Segment]
    uses: Mapping[int, int]
    inputs: tuple[tuple[int, Geometry | None], ...]
    first_states: tuple[tuple[int, torch.Generator], ...]
    until_confirmed: tuple[int, ...]


def course_of(recording: Recording, policy: Policy) -> Course:
    """How calls of the recorded program run under `policy`."""
    ops = _replayed(recording, policy)
    segments = recording.segments.of(ops)
    uses = _uses(recording, segments)
    order = _order(recording, policy, segments, uses)
    states = states_at([draw for op in ops for draw in recording.ops[op].draws])
    instructions, until_confirmed = _instructions(recording, policy, segments, order, states, copied(recording, ops))
    given = (recording.values[i] for i in order if recording.values[i].origin in ("input", "buffer"))
    inputs = tuple((value.index, _taken(value, policy, value.geometry)) for value in given)
    return Course(instructions, order, segments, uses, inputs, tuple(states.get(-1, {}).items()), until_confirmed)


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


def _compresses(value: RecordedValue, policy: Policy) -> bool:
    return is_codec(policy.stores[value.index])


def _taken(value: RecordedValue, policy: Policy, seen: Geometry) -> Geometry | None:
    """The geometry, seen from a tensor, of what the value's holder is given; None if that is the tensor itself."""
    held = flat(value) if _compresses(value, policy) else value.geometry
    if seen == held:
        return None
    is_flat = seen.is_contiguous and seen.numel == held.numel and seen.dtype is held.dtype
    if is_flat and seen.size[-1:] == held.size[-1:] and _compresses(value, policy):
        return None
    return held.seen_from(seen)


def _replayed(recording: Recording, policy: Policy) -> tuple[int, ...]:
    """The operators that backward runs: those with an output that is needed and not stored. A policy may allow more."""
    needed: set[int] = set()
    wanted = sorted(recording.saved)
    while wanted:
        index = wanted.pop()
        producer = recording.values[index].producer
        if policy.stores[index] is None and producer is not None and producer not in needed:
            needed.add(producer)
            wanted.extend(recording.ops[producer].needs)
    return tuple(sorted(needed))


def _uses(recording: Recording, segments: Mapping[int, Segment]) -> Counter[int]:
    uses = Counter(p.ref.index for p in recording.positions if isinstance(p.ref, ValueRef))
    for segment in segments.values():
        uses.update(segment.inputs)
    return uses


def _order(
    recording: Recording, policy: Policy, segments: Mapping[int, Segment], uses: Mapping[int, int]
) -> tuple[int, ...]:
    """The values with a holder, sources first (Rule E10): inputs have the lowest indices, outputs follow in order."""
    return tuple(
        value.index
        for value in recording.values
        if uses.get(value.index) and (policy.stores[value.index] is not None or value.producer in segments)
    )


def _instructions(
    recording: Recording,
    policy: Policy,
    segments: Mapping[int, Segment],
    order: tuple[int, ...],
    states: Mapping[int, Mapping[int, torch.Generator]],
    copies: Collection[int],
) -> tuple[tuple[Instruction, ...], tuple[int, ...]]:
    """The instructions by position, and the values that are kept until the forward has ended."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, position in enumerate(recording.positions):
        if isinstance(position.ref, ValueRef):
            first.setdefault(position.ref.index, number)
            last[position.ref.index] = number
    noted = {index: number for number, indices in states.items() for index in indices}
    ready = _ready(recording, policy, segments, order, {**first, **noted})
    release: dict[int, list[int]] = {}
    for index, number in ready.items():
        if number > first.get(index, number) or number == len(recording.positions):
            release.setdefault(number, []).append(index)
    instructions = (
        _instruction(recording, policy, number, order, (first, last), ready, tuple(release.get(number, ())))
        for number in range(len(recording.positions))
    )
    with_states = tuple(
        replace(instruction, states=tuple(states.get(number, {}).items()), copy=number in copies)
        for number, instruction in enumerate(instructions)
    )
    return with_states, tuple(release.get(len(recording.positions), ()))


def _instruction(
    recording: Recording,
    policy: Policy,
    number: int,
    order: tuple[int, ...],
    sightings: tuple[Mapping[int, int], Mapping[int, int]],
    ready: Mapping[int, int],
    release: tuple[int, ...],
) -> Instruction:
    ref = recording.positions[number].ref
    if ref is None or (isinstance(ref, ValueRef) and ref.index not in order):
        return Instruction(release=release)
    seen = ref.geometry
    look = {"size": seen.size, "stride": seen.stride, "dtype": seen.dtype, "start": seen.start}
    if isinstance(ref, ParameterRef):
        return Instruction(parameter=ref.index, **look, view=seen, release=release)
    value = recording.values[ref.index]
    first, last = sightings
    is_first = first[ref.index] == number and value.origin not in ("input", "buffer")
    hold = is_first and ready.get(ref.index, -1) > number
    fill = is_first and policy.stores[ref.index] is not None and not hold
    root = value.geometry.seen_from(seen)
    return Instruction(
        value=ref.index,
        **look,
        view=None if seen == value.geometry else seen,
        root=root if is_first else None,
        is_part=is_first and (root.start < 0 or root.start + root.span > seen.span),
        again=is_first and last[ref.index] > number,
        fill=fill,
        taken=_taken(value, policy, seen) if fill or hold else None,
        keeps=fill and policy.stores[ref.index] == RETAIN,
        detaches=hold or (fill and not _compresses(value, policy)),
        hold=hold,
        release=release,
    )


def _begin_of_graphs(recording: Recording) -> int:
    """The first position that a graph of torch.compile may have saved.

    If another one runs, it may save more tensors or fewer: then what follows is saved at other positions (Rule R17).
    """
    first = recording.graph_ops[0].index if recording.graph_ops else len(recording.ops) + 1
    positions = enumerate(recording.positions)
    return next((number for number, position in positions if position.ops_done >= first), len(recording.positions))


def _ready(
    recording: Recording,
    policy: Policy,
    segments: Mapping[int, Segment],
    order: tuple[int, ...],
    first: Mapping[int, int],
) -> dict[int, int]:
    """For each rebuilt value, the position after which everything that it is rebuilt from has been saved (Rule E4).

    The end of the forward for each value to be compressed that a graph of torch.compile may save, or the block is given
    (its caller holds that anyway). `first`: the position at which each saved value is seen for the first time, and each
    generator's state is noted.
    """
    ready: dict[int, int] = {}
    saved_at: dict[int, int] = {}
    of_graphs = _begin_of_graphs(recording)
    for index in order:
        value = recording.values[index]
        if policy.stores[index] is not None:
            is_given = value.origin in ("input", "buffer")
            saved_at[index] = -1 if is_given else first[index]
            if recording.graphs and _compresses(value, policy) and (is_given or saved_at[index] >= of_graphs):
                ready[index] = len(recording.positions)
        else:
            inputs = segments[value.producer].inputs
            saved_at[index] = ready[index] = max((saved_at[i] for i in inputs), default=-1)
            if max(first.get(index, -1), ready[index]) >= of_graphs:
                ready[index] = len(recording.positions)  # after all of them
    return ready
