"""A recorded block as one operator: that of which nothing could be replayed otherwise (Rule R20)."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import takewhile

import torch

from ds_adacc.program.arguments import ValueRef
from ds_adacc.program.geometry import Geometry
from ds_adacc.program.recorded_op import RecordedOp
from ds_adacc.program.recording import Position, RecordedValue, Recording
from ds_adacc.program.refusals import COLLECTIVE, REPLACED, STATISTICS, TAINTED, UNSEEN
from ds_adacc.program.whole_block import WholeBlock

_EFFECTS = {
    COLLECTIVE: "it calls a collective, and other ranks may not run it again",
    STATISTICS: "it updates or reads running statistics",
    UNSEEN: "a kernel writes where PyTorch does not see it",
    REPLACED: "it gives a tensor other memory",
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
    written = next((v for v in recording.values if v.overwritten and v.origin != "made"), None)
    return None if written is None else f"it writes to a tensor that it has not made ({written.label or written.name})"


def as_whole(recording: Recording, class_name: str) -> Recording:
    """The recorded block as one operator, which makes one value: all that it makes and backward needs.

    Data decide how many bytes those are. So the program has none of them, as ranks must agree on it: only the profile
    has. Nor does it have what runs once data were read. `buffers` stay those that the operators have read: a second
    forward must find the same tensors there.
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
    op = RecordedOp(0, WholeBlock(class_name), (_until_data_was_read(recording), *read), (), (made.index,))
    why = f"{recording.data_read_at} reads data into Python, or makes a shape that depends on data"
    if recording.data_read_at is None:
        why = "Python reads numbers that it has put into tensors, and that may follow the length of the input"
    remark = f"{why}. So the block is recomputed as a whole, by a second forward, or retained as a whole"
    return replace(
        recording,
        values=(*inputs, made),
        ops=(op,),
        positions=(*(Position(ref, 0, False) for ref in read), Position(ValueRef(made.index, made.geometry), 1, False)),
        remarks=(remark,),
    )


def _until_data_was_read(recording: Recording) -> str:
    """A hash of the operators that every call of the block runs, whatever its sizes."""
    ops = takewhile(lambda op: op.refusal != TAINTED, recording.ops)
    text = repr([(op.name, op.reads, op.outputs) for op in ops])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
