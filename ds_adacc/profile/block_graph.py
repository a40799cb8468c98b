"""A recording as the planner wants it: values, operators and backward steps as plain rows of numbers."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ds_adacc import planner
from ds_adacc.program.arguments import ParameterRef, ValueRef
from ds_adacc.program.recorded_op import RecordedOp
from ds_adacc.program.recording import RecordedValue, Recording
from ds_adacc.program.refusals import COLLECTIVE, OPAQUE
from ds_adacc.program.schema import written_values

_SUMS = ("add", "add_", "sub", "sub_")


@dataclass(frozen=True)
class OperatorCost:
    """What a replay of an operator costs, and its backward step.

    The bytes are what it allocates besides its results and frees again. `early_bytes`: as much of `backward_bytes` as
    the step takes while it has what the operator saved.
    """

    replay_bytes: int = 0
    backward_bytes: int = 0
    early_bytes: int = 0
    replay_seconds: float = 0.0
    backward_seconds: float = 0.0


def block_graph(recording: Recording, costs: Sequence[OperatorCost] = ()) -> planner.BlockGraph:
    """The planner's graph of a verified recording. Values and operators keep their indices (Rule P9).

    `costs`: one for each operator; if empty, no operator takes any bytes besides its results.
    """
    costs = costs or (OperatorCost(),) * len(recording.ops)
    # Of an input that other calls hold too, the gradients of the calls after this one are added up already.
    carried = sum(value.nbytes for value in recording.inputs if value.pinned and value.requires_grad)
    return planner.BlockGraph(
        _values(recording), _ops(recording, costs), _events(recording, costs), carried_bytes=carried
    )


def whole_graph(recording: Recording, saved_bytes: int) -> planner.BlockGraph:
    """The graph of the block as one operator, which makes `saved_bytes`. All of its backward is one step."""
    graph = block_graph(recording)
    *given, saved = graph.values
    event = planner.Event("backward", tuple(sorted(recording.saved)), 0)
    return replace(graph, values=(*given, replace(saved, nbytes=saved_bytes)), events=(event,))


def _values(recording: Recording) -> tuple[planner.Value, ...]:
    # Written to before anyone reads it, a value counts with the one that takes its place.
    absorbed = {index for op in recording.ops for index in op.written}
    alive_until = _discards(recording)
    return tuple(
        planner.Value(
            name=value.name,
            role=value.role,
            nbytes=value.nbytes if value.owned and value.index not in absorbed else 0,
            producer=value.producer,
            storable=value.index in recording.storable,
            on_request=value.origin == "generator",
            alive_until=alive_until.get(value.index, -1),
        )
        for value in recording.values
    )


def _discards(recording: Recording) -> Mapping[int, int]:
    """By value, the last operator to run before the block discards what it was saved for (Rule R18)."""
    last: dict[int, int] = {}
    for position in recording.positions:
        if position.discarded_after is not None and isinstance(position.ref, ValueRef):
            value = position.ref.index
            last[value] = max(last.get(value, -1), position.discarded_after - 1)
    return last


def _ops(recording: Recording, costs: Sequence[OperatorCost]) -> tuple[planner.Op, ...]:
    pairs = zip(recording.segments.ops, costs, strict=True)
    return tuple(replace(op, workspace_bytes=cost.replay_bytes) for op, cost in pairs)


def _events(recording: Recording, costs: Sequence[OperatorCost]) -> tuple[planner.Event, ...]:
    """The operators that have saved something or that gradients pass through, the last first, as backward visits them.

    A tensor packed after n operators is either an output that operator n saves or an input that the next operator
    saves. Where the recording does not tell which, it counts for both.
    """
    unpacked: dict[int, dict[int, None]] = {}
    either = set()
    for position in recording.positions:
        if position.value is not None:
            index, done = position.value, position.ops_done
            unpacked.setdefault(done, {})[index] = None
            if position.fresh and recording.values[index].producer == done - 1:
                unpacked.setdefault(done - 1, {})[index] = None
                either.add(done)
    gradients = GradientLifetimes(recording)
    costs = [*costs, OperatorCost()]  # the last is for views after the last operator
    events = []
    for op in sorted({*unpacked, *gradients.steps}, reverse=True):
        most = gradients.most(op, costs[op].backward_bytes)
        made = late = 0
        if _unpacks_first(recording, op):
            # The operator before may have saved the value. Then the gradients that arrive at its step count.
            arriving = max(gradients.arriving(step) for step in ((op, op - 1) if op in either else (op,)))
            made = max(most - arriving, 0)
            late = most - gradients.most(op, costs[op].early_bytes, sums=False)
        name = f"{recording.ops[op].short_name}{op}" if op < len(recording.ops) else "end"
        events.append(planner.Event(name, tuple(unpacked.get(op, ())), most, made, late))
    return tuple(events)


def _unpacks_first(recording: Recording, op: int) -> bool:
    """Whether the operator's step unpacks all that it has saved before it allocates anything.

    What is written in Python may allocate in between. (So may an `autograd.Function` that is recorded operator by
    operator, which cannot be told from torch's own here.)
    """
    return op < len(recording.ops) and recording.ops[op].is_aten


class GradientLifetimes:
    """Which gradients are alive at each backward step: from the step of a value's last reader to that of its producer.

    `required`: the values that get a gradient.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.required = _require_grad(recording)
        self._readers: dict[int, list[RecordedOp]] = {}
        for op in recording.ops:
            for index in _gets(op):
                self._readers.setdefault(index, []).append(op)
        self._handed_on: dict[int, int] = {}  # by value, the owner of the gradient that its last reader hands on
        self._find_handed_on()

    @property
    def steps(self) -> list[int]:
        """The operators whose backward step makes a gradient. That of a sum only hands on the one that it gets."""
        ops = (op for op in self.recording.ops if op.short_name not in _SUMS and not op.detached)
        return [op.index for op in ops if self.made(op) and self.required.intersection(op.outputs)]

    @property
    def of_outputs(self) -> int:
        """Bytes of the gradients with which the block's backward begins."""
        values = (self.recording.values[index] for index in self.required)
        return sum(value.nbytes for value in values if value.index not in self._readers)

    def most(self, index: int, workspace: int, sums: bool = True) -> int:
        """The most bytes at the step of operator `index`: gradients, and what the step takes and frees again.

        `workspace`: bytes that the operator itself so takes. What it makes is added to other gradients afterwards; that
        counts if `sums`.
        """
        values = self.recording.values
        owners = Counter(self._owner(value, index) for value in self._alive[index])
        total = sum(values[owner].nbytes for owner in owners)
        if index == len(self.recording.ops):
            return total + workspace
        op = self.recording.ops[index]
        if op.detached:
            return total + workspace
        added = [value for value in op.reads if value in self.required and self._last_read(value) > index]
        # A sum takes the place of the gradient that was there first, unless another value's gradient still shares that.
        shared = [value for value in added if owners[self._owner(value, index)] > 1]
        of_sums = max((values[value].nbytes for value in shared), default=0) if sums else 0
        beside = sum(values[value].nbytes for value in added)
        return total + self._parts(op) + beside + self._parameters(op) + max(workspace, of_sums)

    def arriving(self, index: int) -> int:
        """Bytes of the gradients that are alive when the step of operator `index` begins."""
        values = self.recording.values
        owners = {self._owner(v, index) for v in self._alive[index] if self._last_read(v) > index}
        return sum(values[owner].nbytes for owner in owners)

    @functools.cached_property
    def _alive(self) -> list[list[int]]:
        """The values whose gradients are alive at the step of each operator, and after the last one.

        In one pass: a block may have thousands of operators, of which each has few such values.
        """
        born: dict[int, list[int]] = {}
        for value in self.required:
            born.setdefault(max(_born(self.recording.values[value]), 0), []).append(value)
        found: list[list[int]] = []
        alive: list[int] = []
        for index in range(len(self.recording.ops) + 1):
            alive = [value for value in alive if self._last_read(value) >= index] + born.get(index, [])
            found.append(alive)
        return found

    def _last_read(self, value: int) -> float:
        return self._readers[value][-1].index if value in self._readers else math.inf

    def _owner(self, value: int, index: int) -> int:
        """The value with whose gradient that of `value` shares its memory while the step of operator `index` runs.

        The step of a sum hands on the gradient that it gets, to both terms the same. A term keeps it until another of
        its readers adds to it.
        """
        readers = self._readers.get(value, [])
        others_have_added = len(readers) > 1 and index < readers[-2].index
        return value if others_have_added else self._handed_on.get(value, value)

    def _find_handed_on(self) -> None:
        for op in reversed(self.recording.ops):
            for index in _gets(op):
                if self._readers[index][-1] is op and _hands_on(op, index, self.recording):
                    given = op.outputs[-1]
                    assert given is not None  # else it would hand on nothing
                    self._handed_on[index] = self._owner(given, op.index)

    def made(self, op: RecordedOp) -> int:
        """Bytes of the gradients that the step of `op` itself makes."""
        wholes = sum(self.recording.values[index].nbytes for index in op.reads if index in self.required)
        return wholes + self._parts(op) + self._parameters(op)

    def _parts(self, op: RecordedOp) -> int:
        """Each view that is part of a value (q, k and v of one projection) first gets a gradient of its own."""
        total = 0
        for ref in op.references:
            if isinstance(ref, ValueRef) and ref.index in self.required:
                geometry = ref.geometry
                if geometry.numel < self.recording.values[ref.index].geometry.numel:
                    total += geometry.numel * geometry.dtype.itemsize
        return total

    def _parameters(self, op: RecordedOp) -> int:
        """The gradients of the parameters that `op` reads, before they are added to `.grad`."""
        read = {ref.index for ref in op.references if not isinstance(ref, ValueRef)}
        parameters = [self.recording.parameters[index] for index in read]
        return sum(p.element_size() * getattr(p, "ds_numel", p.numel()) for p in parameters if p.requires_grad)


def _born(value: RecordedValue) -> int:
    return -1 if value.producer is None else value.producer


def _hands_on(op: RecordedOp, value: int, recording: Recording) -> bool:
    """Whether the step of `op` hands on the gradient that it gets to `value` as it is."""
    if op.detached:
        return len({*_gets(op)}) == 1  # of several it is not known which is which after the write
    if op.short_name not in _SUMS or dict(op.kwargs).get("alpha", 1) != 1 or op.outputs[-1] is None:
        return False
    terms = op.args[:1] if op.short_name.startswith("sub") else op.args[:2]
    made = recording.values[op.outputs[-1]].geometry
    given = [term.geometry for term in terms if isinstance(term, ValueRef) and term.index == value]
    return [(g.numel, g.dtype) for g in given] == [(made.numel, made.dtype)]


def _gets(op: RecordedOp) -> Sequence[int]:
    """The values that get a gradient from the step of `op`, if they have one. One written to past autograd keeps it."""
    return written_values(op) if op.detached else op.reads


def _returned(op: RecordedOp) -> tuple[int | None, ...]:
    """The outputs that may have a gradient: not what an `autograd.Function` has saved."""
    if not op.is_function:
        return op.outputs
    saved = op.func.place_of_saved
    return (*op.outputs[: saved.start], *op.outputs[saved.stop :])


def _require_grad(recording: Recording) -> set[int]:
    required = {value.index for value in recording.inputs if value.requires_grad}
    for op in recording.ops:
        if _has_gradients(op) or not required.isdisjoint(_gets(op)):
            made = [recording.values[index] for index in _returned(op) if index is not None]
            required.update(v.index for v in made if _has_gradient(v.geometry.dtype) and v.role != "statistic")
    return required


def _has_gradients(op: RecordedOp) -> bool:
    """Whether what `op` makes has a gradient, whichever values it reads."""
    if op.detached:
        return False
    # Of a collective, or a higher-order operator, it is not recorded what it reads (`Draft.arguments`).
    is_seen = op.detached is None or op.refusal in (OPAQUE, COLLECTIVE)
    return is_seen or any(isinstance(ref, ParameterRef) for ref in op.references)


def _has_gradient(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
