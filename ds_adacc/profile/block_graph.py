"""A recording as the planner wants it: values, operators and backward steps as plain rows of numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ds_adacc import planner
from ds_adacc.profile.gradient_memory import GradientMemory
from ds_adacc.program.arguments import ValueRef
from ds_adacc.program.recording import Recording


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
    parts = _values(recording), _ops(recording, costs), _events(recording, costs)
    return planner.BlockGraph(*parts, carried_bytes=carried_bytes(recording))


def carried_bytes(recording: Recording, retained: Collection[int] = ()) -> int:
    """Bytes of the gradients that later calls have left for this one to add to (`BlockGraph.carried_bytes`).

    They are of the inputs that an earlier call holds, and of those at the places `retained`, which later calls are
    given too.
    """
    shared = (value for value in recording.inputs if value.pinned or value.source in retained)
    return sum(value.nbytes for value in shared if value.requires_grad)


def whole_graph(recording: Recording, saved_bytes: int) -> planner.BlockGraph:
    """The graph of the block as one operator, which makes `saved_bytes`. All of its backward is one step."""
    graph = block_graph(recording)
    *given, saved = graph.values
    event = planner.Event("backward", tuple(sorted(recording.saved)), 0)
    return replace(graph, values=(*given, replace(saved, nbytes=saved_bytes)), events=(event,))


def _values(recording: Recording) -> tuple[planner.Value, ...]:
    # Written to before anyone reads it, a value counts with the one that takes its place.
    absorbed = {index for op in recording.ops for index in op.written}
    discarded = _discards(recording)
    cached = {index for op in recording.ops if op.cached for index in op.outputs}
    return tuple(
        planner.Value(
            name=value.name,
            role=value.role,
            nbytes=value.nbytes if value.owned and value.index not in absorbed else 0,
            producer=value.producer,
            storable=value.index in recording.storable,
            on_request=value.origin == "generator",
            alive_until=max(value.alive_until, discarded.get(value.index, -1)),
            cached=value.index in cached,
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
    """The operators that have saved something or that make gradients, the last first, as backward visits them."""
    unpacked: dict[int, dict[int, None]] = {}
    for position in recording.positions:
        if position.value is not None:
            unpacked.setdefault(position.op, {})[position.value] = None
    gradients = GradientMemory(recording.backward)
    costs = [*costs, OperatorCost()]  # the last is for views after the last operator
    ops = {*unpacked, *gradients.makers}
    if not ops and recording.backward.ends:  # only sums and views: they take memory all the same
        ops = {0}
    steps, last = gradients.steps(ops), min(ops, default=0)
    events = []
    for op, step in steps.items():
        after = max(step.after, gradients.left + _of_whole_inputs(recording)) if op == last else step.after
        during = step.during + costs[op].backward_bytes
        most = max(during, after)
        made, late = 0, most - during
        if _unpacks_first(recording, op):
            made, late = max(most - step.arriving, 0), most - step.during - costs[op].early_bytes
        name = f"{recording.ops[op].short_name}{op}" if op < len(recording.ops) else "end"
        events.append(planner.Event(name, tuple(unpacked.get(op, ())), most, made, late, most - during))
    return tuple(events)


def _of_whole_inputs(recording: Recording) -> int:
    """The most bytes that follow the block's backward, outside of it, for an input that is a part of a larger tensor.

    Its gradient is put into one of the whole, as far as the input spans that.
    """
    inputs = (value for value in recording.inputs if value.requires_grad and value.nbytes > value.geometry.nbytes)
    return max((value.nbytes for value in inputs), default=0)


def _unpacks_first(recording: Recording, op: int) -> bool:
    """Whether the operator's step unpacks all that it has saved before it allocates anything.

    What is written in Python may allocate in between. (So may an `autograd.Function` that is recorded operator by
    operator, which cannot be told from torch's own here.)
    """
    return op < len(recording.ops) and recording.ops[op].is_aten
