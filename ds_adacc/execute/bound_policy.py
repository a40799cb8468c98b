"""A policy bound to one block: its course, with the block's own codecs, parameters and replays."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_adacc.execute.course import Course, course_of, flat, needs_of
from ds_adacc.execute.holders import Compressed, Compression, Facts, Retained
from ds_adacc.execute.host_offload import Prefetcher
from ds_adacc.kernels import Codec
from ds_adacc.planner import OFFLOAD, RETAIN, Policy, is_codec
from ds_adacc.program.arguments import ParameterRef
from ds_adacc.program.recording import RecordedValue, Recording
from ds_adacc.program.replay import Rerun, Updates


@dataclass(frozen=True)
class BoundPolicy:
    """How to execute one block's calls under a policy.

    `codecs`: by compressed value. `replays`: by operator that backward replays. `prefetcher`: None unless a value is
    offloaded.
    """

    recording: Recording
    policy: Policy
    course: Course
    codecs: Mapping[int, Codec]
    replays: Mapping[int, Rerun]
    prefetcher: Prefetcher | None = None

    @functools.cached_property
    def stored(self) -> tuple[tuple[int, type[Retained | Compressed], Any], ...]:
        """The values that are retained or compressed: index, class of the holder, and the holder's argument."""
        found = []
        for index, value, choice in self._choices():
            if choice == RETAIN:
                found.append((index, Retained, value.name))
            elif is_codec(choice):
                found.append((index, Compressed, compression(value, self.codecs[index], self.course.uses[index])))
        return tuple(found)

    @functools.cached_property
    def offloaded(self) -> tuple[tuple[int, Facts], ...]:
        """The values that are offloaded: index, and what the holder knows of the value."""
        offloaded = ((index, value) for index, value, choice in self._choices() if choice == OFFLOAD)
        return tuple((index, Facts(value.name, value.geometry, self.course.uses[index])) for index, value in offloaded)

    @functools.cached_property
    def rebuilt(self) -> tuple[tuple[int, str, int, int], ...]:
        """The values that are rebuilt: index, name, the operator that makes the value, and which output it is."""
        rebuilt = ((index, value) for index, value, choice in self._choices() if choice is None)
        return tuple((index, value.name, value.producer, value.output) for index, value in rebuilt)

    def _choices(self) -> Iterator[tuple[int, RecordedValue, str | None]]:
        """In the order of the course, each value with what becomes of it."""
        return ((index, self.recording.values[index], self.policy.stores[index]) for index in self.course.order)

    @property
    def is_trivial(self) -> bool:
        """Whether everything is retained: plain autograd does the same without hooks (Rule E2)."""
        return not self.replays and not self.codecs and self.prefetcher is None


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
    offloaded = [recording.values[index].name for index in course.order if policy.stores[index] == OFFLOAD]
    if offloaded and prefetcher is None:
        raise ValueError(f"the policy offloads value {offloaded[0]}, which needs a prefetcher; got None")
    return BoundPolicy(
        recording,
        policy,
        course,
        {index: codec for index, codec in codecs.items() if index in course.order},
        {op: _rerun(recording, op, before, policy, course.uses, updates) for op, before in course.replays.items()},
        prefetcher if offloaded else None,
    )


def compression(value: RecordedValue, codec: Codec, uses: int) -> Compression:
    """What the holder of a compressed value knows of it before the call."""
    seen = flat(value)
    if value.geometry.is_contiguous and value.geometry.size[-1:] == seen.size[-1:]:
        seen = value.geometry  # the codec gives the value its own shape
    return Compression(value.name, value.geometry, uses, codec, seen.size, value.device)


def _rerun(
    recording: Recording,
    index: int,
    before: Sequence[int],
    policy: Policy,
    uses: Mapping[int, int],
    updates: Updates,
) -> Rerun:
    """The replay of an operator with those `before` it. An output that is stored is never asked of it."""
    op, parts = recording.ops[index], [recording.ops[part] for part in before]
    sources = (source for part in (*parts, op) for source in part.sources)
    read = dict.fromkeys(ref.index for ref in sources if isinstance(ref, ParameterRef))
    last = {need: part.index for part in (*parts, op) for need in part.needs if recording.passing.get(need) == index}
    return Rerun(
        op,
        tuple((part, tuple(need for need, end in last.items() if end == part.index)) for part in parts),
        needs_of(recording, index, before),
        recording.parameters,
        tuple(read),
        tuple(0 if i is None or policy.stores[i] is not None else uses.get(i, 0) for i in op.outputs),
        updates,
    )
