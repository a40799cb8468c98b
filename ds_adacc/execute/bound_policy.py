"""A policy bound to one block: its course, with the block's own codecs, parameters and replays."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ds_adacc.execute.bound_segment import BoundSegment, Updates
from ds_adacc.execute.course import Course, course_of, flat
from ds_adacc.execute.holders import Compressed, Compression, Offloaded, OffloadedPayload, Retained, ValueFacts
from ds_adacc.execute.host_offload import Prefetcher
from ds_adacc.kernels import Codec
from ds_adacc.planner import OFFLOAD, RETAIN, Policy, Segment, is_codec, is_offloaded
from ds_adacc.program.arguments import ParameterRef
from ds_adacc.program.recorded_op import RecordedOp
from ds_adacc.program.recording import RecordedValue, Recording


@dataclass(frozen=True)
class BoundPolicy:
    """How to execute one block's calls under a policy.

    `codecs`: by compressed value. `segments`: by the operator at the end of each replay. `prefetcher`: None unless a
    value or a payload is offloaded.
    """

    recording: Recording
    policy: Policy
    course: Course
    codecs: Mapping[int, Codec]
    segments: Mapping[int, BoundSegment]
    prefetcher: Prefetcher | None

    @functools.cached_property
    def stored(self) -> tuple[tuple[int, type[Retained | Compressed], Any], ...]:
        """The values retained or compressed on their device: index, class of the holder, and the holder's argument."""
        found: list[tuple[int, type[Retained | Compressed], Any]] = []
        for index, value, choice in self._choices():
            if choice == RETAIN:
                found.append((index, Retained, value.name))
            elif is_codec(choice) and not is_offloaded(choice):
                found.append((index, Compressed, compression(value, self.codecs[index], self.course.uses[index])))
        return tuple(found)

    @functools.cached_property
    def offloaded(self) -> tuple[tuple[int, type[Offloaded | OffloadedPayload], Any], ...]:
        """The values offloaded, as they are or compressed: index, class of the holder, and what that knows of them."""
        found: list[tuple[int, type[Offloaded | OffloadedPayload], Any]] = []
        for index, value, choice in self._choices():
            uses = self.course.uses[index]
            if choice == OFFLOAD:
                found.append((index, Offloaded, ValueFacts(value.name, value.geometry, uses)))
            elif is_offloaded(choice):
                found.append((index, OffloadedPayload, compression(value, self.codecs[index], uses)))
        return tuple(found)

    def moved_bytes(self, index: int) -> int:
        """The bytes that one call copies to the host of a value in `offloaded`."""
        value, codec = self.recording.values[index], self.codecs.get(index)
        return value.nbytes if codec is None else codec.payload_bytes(flat(value).size, value.geometry.dtype)

    @functools.cached_property
    def rebuilt(self) -> tuple[tuple[int, str, int, int], ...]:
        """The values that are rebuilt: index, name, the operator that makes the value, and which output it is."""
        return tuple(
            (index, value.name, value.producer, value.output)
            for index, value, choice in self._choices()
            if choice is None and value.producer is not None
        )

    def _choices(self) -> Iterator[tuple[int, RecordedValue, str | None]]:
        """In the order of the course, each value with what becomes of it."""
        return ((index, self.recording.values[index], self.policy.stores[index]) for index in self.course.order)

    @property
    def is_trivial(self) -> bool:
        """Whether everything is retained: plain autograd does the same without hooks (Rule E2)."""
        return not self.segments and not self.codecs and self.prefetcher is None


def bind(
    recording: Recording,
    policy: Policy,
    codecs: Mapping[int, Codec],
    prefetcher: Prefetcher | None = None,
    course: Course | None = None,
    updates: Updates | None = None,
) -> BoundPolicy:
    """Bind `policy` to the recorded block. `codecs` has the codec of each compressed value.

    `course`: `course_of` the two, if it is known already. `updates`: the steps of the optimizer that trains the block.

    Raises ValueError if a value is offloaded and there is no `prefetcher`.
    """
    course, updates = course or course_of(recording, policy), updates or Updates()
    offloaded = [recording.values[index].name for index in course.order if is_offloaded(policy.stores[index])]
    if offloaded and prefetcher is None:
        raise ValueError(f"the policy offloads value {offloaded[0]}, which needs a prefetcher; got None")
    return BoundPolicy(
        recording,
        policy,
        course,
        {index: codec for index, codec in codecs.items() if index in course.order},
        {end: _bound(recording, each, policy, course.uses, updates) for end, each in course.segments.items()},
        prefetcher if offloaded else None,
    )


def compression(value: RecordedValue, codec: Codec, uses: int) -> Compression:
    """What the holder of a compressed value knows of it before the call."""
    seen = flat(value)
    if value.geometry.is_contiguous and value.geometry.size[-1:] == seen.size[-1:]:
        seen = value.geometry  # the codec gives the value its own shape
    return Compression(value.name, value.geometry, uses, codec, seen.size, value.device)


def _bound(
    recording: Recording, segment: Segment, policy: Policy, uses: Mapping[int, int], updates: Updates
) -> BoundSegment:
    """The replay of a segment. An output of its last operator that is stored is never asked of it."""
    *before, op = ops = [recording.ops[index] for index in segment.ops]
    read = dict.fromkeys(ref.index for part in ops for ref in part.sources if isinstance(ref, ParameterRef))
    return BoundSegment(
        op,
        tuple((part, _ended(part, segment.last_readers)) for part in before),
        segment.inputs,
        recording.parameters,
        tuple(read),
        tuple(0 if i is None or policy.stores[i] is not None else uses.get(i, 0) for i in op.outputs),
        updates,
    )


def _ended(op: RecordedOp, last: Mapping[int, int]) -> tuple[int | None, ...]:
    """What nothing reads after `op`: values that it is the `last` to read, and those of its outputs that nobody reads.

    None stands for an output that is no value of its own, such as the tensor that an operator has written to.
    """
    read = [value for value, end in last.items() if end == op.index]
    return (*read, *dict.fromkeys(value for value in op.outputs if value not in last))
