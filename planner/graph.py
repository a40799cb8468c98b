"""One block as the planner sees it: values, the ops that make them, and what backward needs.

This is the "problem definition" of the paper (section 3.3). The paper speaks of layers; here tensors and operators are
separate, because an operator may have several outputs and several steps of backward may need one tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ds_adacc.planner.segments import Op, Segment, Segments
from ds_adacc.planner.units import By, Bytes, DeductedBytes, Guarantee, check_numbers, combined


@dataclass(frozen=True)
class Value:
    """One tensor of the block (views share their root's value).

    `nbytes` is the size of its storage in bytes, 0 if the caller keeps it alive anyway. `producer` is the index of the
    op that makes it, None for a block input or for a value that cannot be rebuilt. `storable` says that the executor
    can hold it, because autograd saves it or because it is a block input. `on_request`: it takes memory only if it is
    stored. `alive_until`: the op of forward until which it is alive whatever is stored, also after its last reader; -1
    if that is not known. `cached`: a cache outside of the block holds it until the forward of the whole model has
    ended, whatever is stored, as autocast's holds its casts of weights. `lent`: no backward asks for it, but other
    blocks are given it too, and it does not count there again. So the last event lists it. Only where no block replays
    anything, it need not be stored; then the program has it until the forward of the model has ended.
    """

    name: str
    role: str
    nbytes: Bytes
    producer: int | None
    storable: bool
    on_request: bool = False
    alive_until: int = -1
    cached: bool = False
    lent: bool = False


@dataclass(frozen=True)
class Event:
    """One step of backward: the values it unpacks (distinct).

    `gradient_bytes`: the gradients alive during the step, and the workspace of the step itself. `made_bytes`: the part
    of them that the step allocates after its values are rebuilt, so never beside the workspace of a replay.
    `late_bytes`: the part that is allocated after the step has freed the copies of its values. `after_bytes`: the part
    of these that is allocated after the step has ended, which frees what is retained of its values, too.
    """

    name: str
    values: tuple[int, ...]
    gradient_bytes: Bytes
    made_bytes: DeductedBytes = 0
    late_bytes: DeductedBytes = 0
    after_bytes: DeductedBytes = 0

    @property
    def clipped(self) -> Event:
        """This event with no more bytes of each part than of what it is a part of."""
        late = min(self.late_bytes, self.gradient_bytes)
        return replace(
            self,
            made_bytes=min(self.made_bytes, self.gradient_bytes),
            late_bytes=late,
            after_bytes=min(self.after_bytes, late),
        )


@dataclass(frozen=True)
class BlockGraph:
    """The block: `ops` in forward (topological) order, `events` in backward order (`events[0]` runs first).

    `forward_overhead`: bytes alive in forward that are not outputs of the ops, such as what Python variables keep.
    `carried_bytes`: those of gradients that the backward of later blocks has left for this one to add to: of an input
    that they are given too. The last block in forward order has none.
    `frees_stored`: backward frees what is stored of a value when no event is left that may need it (see `kept`).
    Raises ValueError, naming the culprit, if indices, orders or producers do not fit together, or if backward needs
    a value that can be neither stored nor rebuilt.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    events: tuple[Event, ...]
    forward_overhead: Bytes = 0
    carried_bytes: Bytes = 0
    frees_stored: Guarantee = True

    def __post_init__(self) -> None:
        check_numbers(self)
        for value in self.values:
            check_numbers(value, "value", value.name)
        for index in range(len(self.ops)):
            self._check_op(index)
        for index, value in enumerate(self.values):
            self._check_producer(index, value)
        usable = self.rebuildable_ops
        for event in self.events:
            self._check_event(event, usable)

    @staticmethod
    def combined(graphs: Sequence[BlockGraph], by: By) -> BlockGraph:
        """The first of these graphs of one shape, with each number, those of its parts too, as `by` makes it of all."""
        parts: dict[str, Any] = {
            name: tuple(combined(each, by) for each in zip(*(getattr(graph, name) for graph in graphs), strict=True))
            for name in ("values", "ops", "events")
        }
        return replace(combined(graphs, by), **parts)

    @property
    def kept(self) -> BlockGraph:
        """This block if a backward keeps the graph of its calls (`retain_graph`): what is stored stays to the end."""
        events = tuple(replace(event, after_bytes=0) for event in self.events)
        return replace(self, events=events, frees_stored=False)

    @property
    def uncached(self) -> BlockGraph:
        """This block if no cache outside of it holds its values longer than its forward runs."""
        return replace(self, values=tuple(replace(value, cached=False) for value in self.values))

    @property
    def has_cached(self) -> bool:
        """Whether a cache outside of the block holds any of its values until the model's forward has ended."""
        return any(value.cached for value in self.values)

    @functools.cached_property
    def lends(self) -> bool:
        """Whether any of its values is lent to other blocks."""
        return any(value.lent for value in self.values)

    @property
    def saved(self) -> tuple[int, ...]:
        """The values that backward needs, sorted."""
        return tuple(sorted({index for event in self.events for index in event.values}))

    @functools.cached_property
    def rebuildable_ops(self) -> frozenset[int]:
        """Ops that can be replayed in backward: proven, and each of their inputs can be stored or rebuilt."""
        return self._segments.rebuildable

    @functools.cached_property
    def segments(self) -> dict[int, Segment]:
        """What backward may replay: by the op at the end of each replay, all that it runs."""
        return self._segments.of(sorted(self.rebuildable_ops))

    def replayed(self, stores: Sequence[str | None]) -> tuple[int, ...]:
        """The ops that backward replays under a policy with these `stores`, sorted."""
        return self._segments.replayed(stores)

    @functools.cached_property
    def replay_bytes(self) -> Mapping[int, int]:
        """By the op at the end of each replay, what it takes at its peak besides its outputs, with what passes through.

        The simulator counts outputs from the start of a replay. A single output does not exist until the last op runs,
        so earlier ops may use its room.
        """
        return {end: self._replay_bytes(segment) for end, segment in self.segments.items()}

    def _replay_bytes(self, segment: Segment) -> int:
        last, end = segment.last_readers, segment.ops[-1]
        results = self.ops[end].outputs
        room = self.values[results[0]].nbytes if len(results) == 1 else 0
        alive = most = 0
        for index in segment.ops:
            op = self.ops[index]
            made = 0 if index == end else sum(self.values[value].nbytes for value in op.outputs) - room
            most = max(most, alive + made + op.workspace_bytes)
            alive += sum(self.values[value].nbytes for value in op.outputs if value in last)
            alive -= sum(self.values[value].nbytes for value, reader in last.items() if reader == index)
        return most

    @functools.cached_property
    def _segments(self) -> Segments:
        storable = frozenset(index for index, value in enumerate(self.values) if value.storable)
        return Segments(self.ops, storable, self.saved)

    @functools.cached_property
    def kept_until(self) -> tuple[int, ...]:
        """Per value, the last event at which what is stored of it is alive; -1 if no event needs it."""
        end = len(self.events) - 1
        return tuple(last if self.frees_stored or last < 0 else end for last in self._needed_until)

    @functools.cached_property
    def _needed_until(self) -> tuple[int, ...]:
        """Per value, the last event that asks for it or for what may be rebuilt from it; -1 if none does.

        Until then what is stored of it stays: someone may run backward again, or in parts.
        """
        until = [-1] * len(self.values)
        for time, event in enumerate(self.events):
            for value in event.values:
                until[value] = time
        for index in sorted(self.rebuildable_ops, reverse=True):
            latest = max((until[value] for value in self.ops[index].outputs), default=-1)
            for value in self.ops[index].inputs:
                until[value] = max(until[value], latest)
        return tuple(until)

    def let_go(self, time: int) -> tuple[int, ...]:
        """The values of an event that no later one may need. A copy of such a value is gone when the step has run."""
        return tuple(value for value in self.events[time].values if self._needed_until[value] == time)

    @functools.cached_property
    def forward_lives(self) -> tuple[tuple[int, int], ...]:
        """Per value, the first and the last op of forward at which it is alive even if nothing is stored.

        A value on request is alive at none: its last op is -1.
        """
        end = len(self.ops) - 1
        readers = {value: index for index, op in enumerate(self.ops) for value in op.inputs}
        return tuple(
            (value.producer or 0, self._last_alive(value, readers.get(index, -1), end))
            for index, value in enumerate(self.values)
        )

    def _last_alive(self, value: Value, reader: int, end: int) -> int:
        if value.on_request:
            return -1
        until = max(reader, value.alive_until)
        return end if value.producer is None or value.cached or until < 0 else until

    @functools.cached_property
    def read_together(self) -> Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]]:
        """The ops of which one step of backward reads inputs and outputs: by op, these inputs and these outputs."""
        found: dict[int, tuple[set[int], set[int]]] = {}
        for event in self.events:
            for output in event.values:
                producer = self.values[output].producer
                if producer is None:
                    continue
                if inputs := set(self.ops[producer].inputs) & set(event.values) - {output}:
                    ins, outs = found.setdefault(producer, (set(), set()))
                    ins |= inputs
                    outs.add(output)
        return {op: (tuple(sorted(ins)), tuple(sorted(outs))) for op, (ins, outs) in sorted(found.items())}

    def _check_op(self, index: int) -> None:
        op = self.ops[index]
        check_numbers(op, "op", op.name)
        self._check_indices(f"op {op.name!r}", (*op.inputs, *op.outputs))
        for value in op.inputs:
            producer = self.values[value].producer
            if producer is not None and producer >= index:
                raise ValueError(
                    f"op {op.name!r} (index {index}) reads value {self.values[value].name!r}, which op {producer} "
                    "makes: each op must come after those that make its inputs"
                )
        for value in op.outputs:
            if self.values[value].producer != index or op.outputs.count(value) > 1:
                raise ValueError(
                    f"op {op.name!r} (index {index}) lists output {self.values[value].name!r}, whose producer is "
                    f"{self.values[value].producer}: list it once, with producer {index}"
                )

    def _check_producer(self, index: int, value: Value) -> None:
        if value.producer is None:
            return
        if not 0 <= value.producer < len(self.ops):
            raise ValueError(
                f"value {value.name!r} has producer {value.producer}; valid are None and 0..{len(self.ops) - 1}"
            )
        if index not in self.ops[value.producer].outputs:
            raise ValueError(
                f"value {value.name!r} has producer {value.producer} ({self.ops[value.producer].name!r}), "
                f"which does not list value {index} among its outputs"
            )

    def _check_event(self, event: Event, usable: Collection[int]) -> None:
        check_numbers(event, "event", event.name)
        self._check_indices(f"event {event.name!r}", event.values)
        if len(set(event.values)) != len(event.values):
            raise ValueError(f"event {event.name!r} lists values {event.values}: each must appear once")
        for index in event.values:
            if not (self.values[index].storable or self.values[index].producer in usable):
                raise ValueError(
                    f"event {event.name!r} needs value {self.values[index].name!r}, which is neither storable nor "
                    "made by a replayable op whose inputs can be had: mark it storable"
                )

    def _check_indices(self, where: str, indices: Collection[int]) -> None:
        for index in indices:
            if not 0 <= index < len(self.values):
                raise ValueError(f"{where} refers to value {index}; valid are 0..{len(self.values) - 1}")
