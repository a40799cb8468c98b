"""Replay every operator of a fresh recording on the real data, and compare the results bit for bit (Rule 9)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_adacc.record.generators import unmoved
from ds_adacc.record.geometry import same_bits
from ds_adacc.record.recording import RecordedOp, Recording
from ds_adacc.record.replay import replay


def verify(recording: Recording, tensors: Sequence[torch.Tensor]) -> Recording:
    """The recording, in which each operator is refused whose replay does not give the bits of `tensors`.

    `tensors` are the recorded values themselves, by index, still alive. Rule 10: no generator is moved.
    """
    reasons: dict[int, str] = {}
    with unmoved(recording.generators):
        for op in recording.ops:
            if op.replayable:
                reason = _inaccessible(op, recording) or _differs(op, recording, tensors)
                if reason:
                    reasons[op.index] = reason
    return recording.refuse(reasons)


def _inaccessible(op: RecordedOp, recording: Recording) -> str | None:
    for index in op.needs:
        value = recording.values[index]
        if value.overwritten:  # Rule 4
            return f"{value.name} is overwritten in place"
        if value.origin == "captured" and index not in recording.saved:
            return f"it reads {value.name}, a tensor from outside the block that is neither an argument nor a buffer"
    for index in op.outputs:
        if index is not None and recording.values[index].overwritten:
            return f"{recording.values[index].name} is overwritten in place"
    return None


def _differs(op: RecordedOp, recording: Recording, tensors: Sequence[torch.Tensor]) -> str | None:
    try:
        outputs = replay(op, tensors.__getitem__, recording.parameters)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"its replay fails: {type(error).__name__}: {error}"
    for index, output in zip(op.outputs, outputs, strict=False):
        if index is not None and not same_bits(output, tensors[index]):
            return "its replay gives other bits"
    return None
