"""A recorded block as one operator: that of which nothing could be replayed otherwise (Rule R20)."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import takewhile

import torch
from torch import nn

from ds_adacc.program.arguments import ValueRef
from ds_adacc.program.backward_graph import BackwardGraph
from ds_adacc.program.geometry import Geometry
from ds_adacc.program.recorded_op import RecordedOp, WholeBlock
from ds_adacc.program.recording import Position, RecordedValue, Recording
from ds_adacc.program.refusals import COLLECTIVE, REPLACED, STATISTICS, TAINTED, UNSEEN, WRITTEN

_EFFECTS = {
    STATISTICS: "it updates or reads running statistics",
    UNSEEN: "a kernel writes where PyTorch does not see it",
    REPLACED: "it gives a tensor other memory",
    WRITTEN: "it writes to a parameter",
}


def why_not_again(recording: Recording) -> str | None:
    """Why the forward of the recorded block must not run a second time, as far as its operators tell."""
    if recording.runs_compiled or recording.hides_compiled:
        return "it runs compiled code"
    for op in recording.ops:
        if op.refusal in _EFFECTS:
            return _EFFECTS[op.refusal]
        if "batch_norm" in op.name:  # that it updates its statistics was left out of the recording
            return _EFFECTS[STATISTICS]
    written = next((v for v in recording.values if _is_written(v) and not _is_registered(recording, v)), None)
    return None if written is None else f"it writes to a tensor that it has not made ({written.label or written.name})"


def _is_written(value: RecordedValue) -> bool:
    return value.overwritten and value.origin != "made"


def _is_registered(recording: Recording, value: RecordedValue) -> bool:
    """Whether it is a buffer that a module of the block has registered. Only such a one can be put back."""
    if value.origin != "buffer":
        return False
    owner, path = recording.buffers[value.source]
    module = owner()
    return isinstance(module, nn.Module) and len(path) == 1 and path[0] in module._buffers


def calls_collective(recording: Recording, once_data_was_read: bool = False) -> bool:
    """Whether an operator of the recorded block is a collective; once data was read, if that is asked."""
    first = next((op.index for op in recording.ops if op.refusal == TAINTED), len(recording.ops))
    after = first if once_data_was_read else 0
    return any(op.refusal == COLLECTIVE for op in recording.ops[after:])


def as_whole(recording: Recording, class_name: str, repeats_collectives: bool = False) -> Recording:
    """The recorded block as one operator, which makes one value: all that it makes and backward needs.

    Data decide how many bytes those are. So the program has none of them, as ranks must agree on it: only the profile
    has. Nor does it have what runs once data were read. `buffers` stay those that the operators have read: a second
    forward must find the same tensors there. `repeats_collectives`: as of `WholeBlock`.
    """
    inputs = tuple(replace(value, index=index) for index, value in enumerate(recording.inputs))
    made = RecordedValue(
        index=len(inputs),
        name="forward",
        origin="made",
        geometry=Geometry((0,), (1,), torch.uint8, 0),
        producer=0,
        device=next((value.device for value in recording.values if value.origin == "made"), "cpu"),
        label="all that its forward saves",
    )
    read = tuple(ValueRef(value.index, value.geometry) for value in inputs)
    written = tuple(v.source for v in recording.values if _is_written(v) and _is_registered(recording, v))
    func = WholeBlock(class_name, repeats_collectives, written)
    op = RecordedOp(0, func, (_alike(recording), *read), (), (made.index,))
    return replace(
        recording,
        values=(*inputs, made),
        ops=(op,),
        positions=(*(Position(ref, 0) for ref in read), Position(ValueRef(made.index, made.geometry), 1)),
        remarks=(_remark(recording, repeats_collectives),),
        backward=BackwardGraph(),
    )


def _remark(recording: Recording, repeats_collectives: bool) -> str:
    if recording.data_read_at is not None:
        why = f"{recording.data_read_at} reads data into Python, or makes a shape that depends on data"
    elif recording.numbers_read_after is not None:
        why = "Python reads numbers that it has put into tensors, and that may follow the length of the input"
    else:
        why = "In other calls, or on other ranks, the block reads data into Python"
    remark = f"{why}. So the block is recomputed as a whole, by a second forward, or retained as a whole"
    if repeats_collectives:
        remark += ". A second forward calls collectives, so all ranks run it or none does"
    return remark


def _alike(recording: Recording) -> str:
    """A hash of what is the same in every call of the block, whatever its sizes: the operators until data are read."""
    ops = takewhile(lambda op: op.refusal != TAINTED, recording.ops)
    text = repr([(op.name, op.reads, op.outputs) for op in ops])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
