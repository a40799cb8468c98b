"""Replay every operator of a fresh recording on the real data, and compare the results bit for bit (Rule 9)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_adacc.record.geometry import same_bits
from ds_adacc.record.recording import RecordedOp, Recording
from ds_adacc.record.replay import replay


def verify(recording: Recording, tensors: Sequence[torch.Tensor]) -> Recording:
    """The recording, in which each operator is refused whose replay does not give the bits of `tensors`.

    `tensors` are the recorded values themselves, by index, still alive.
    """
    reasons: dict[int, str] = {}
    for op in recording.ops:
        if op.replayable:
            reason = _inaccessible(op, recording) or _differs(op, recording, tensors)
            if reason:
                reasons[op.index] = reason
    return recording.refuse(reasons)


def _inaccessible(op: RecordedOp, recording: Recording) -> str | None:
    for index in op.reads:
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
    random = torch.Tag.nondeterministic_seeded in getattr(op.func, "tags", ())
    before = _random_state(tensors) if random else []
    try:
        outputs = replay(op, tensors.__getitem__, recording.parameters)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"its replay fails: {type(error).__name__}: {error}"
    finally:
        moved = random and _restore_random_state(tensors, before)
    if moved:
        return "it draws random numbers"  # Rule 6
    for index, output in zip(op.outputs, outputs, strict=False):
        if index is not None and not same_bits(output, tensors[index]):
            return "its replay gives other bits"
    return None


def _random_state(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    device = next((t.device for t in tensors if t.device.type == "cuda"), None)
    if device is not None:
        states.append(torch.cuda.get_rng_state(device))
    return states


def _restore_random_state(tensors: Sequence[torch.Tensor], before: list[torch.Tensor]) -> bool:
    """Rule 10: put the generators back where they were. Returns whether they had moved."""
    moved = any(not torch.equal(a, b) for a, b in zip(before, _random_state(tensors), strict=True))
    if moved:
        torch.set_rng_state(before[0])
        if len(before) > 1:
            device = next(t.device for t in tensors if t.device.type == "cuda")
            torch.cuda.set_rng_state(before[1], device)
    return moved
