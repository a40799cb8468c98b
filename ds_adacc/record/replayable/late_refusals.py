"""Why operators must not be replayed that give the same bits, as far as only the whole program tells."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from ds_adacc.program.arguments import ParameterRef, ValueRef
from ds_adacc.program.recorded_op import RecordedOp
from ds_adacc.program.recording import Recording
from ds_adacc.program.refusals import MOVED, STATISTICS
from ds_adacc.record.known_tensors import KnownTensors


def readers_of_changed(
    ops: Sequence[RecordedOp], known: KnownTensors, statistics: Iterable[torch.Tensor], parameters: Mapping[int, str]
) -> dict[int, str]:
    """The operators that read buffers or parameters that the forward changes, each with why it is not replayed.

    Rule R6. `statistics`: the buffers that batch norms have updated. `parameters`: by the index of a parameter that the
    forward changes, or seems to change, why what reads it is not replayed.
    """
    updated = {index for tensor in statistics for index in known.in_storage(tensor)}
    changed = {**parameters, **dict.fromkeys(known.moved(), MOVED)}
    read = ((op, ref.index) for op in ops for ref in op.sources if type(ref) is ParameterRef)
    readers = {op.index: STATISTICS for op in ops if updated.intersection(op.needs)}
    return readers | {op.index: changed[parameter] for op, parameter in read if parameter in changed}


def extra_refusals(recording: Recording, first_doubtful: int | None, masks: Collection[int]) -> dict[int, str]:
    """Why operators must not be replayed although their schema allows it and they give the same bits (Rule R7).

    A mask that decides a shape is not rebuilt: rebuilt from quantised data, it would select another number of
    elements. Nor are values that autograd first saves after Python has read data, or after compiled code that no call
    finds again has run: another branch, or another compilation, may save other tensors in their place.

    `first_doubtful`: the number of the first tensor that was saved after that, None if it never happened. `masks`: the
    values that decide a shape.
    """
    values = recording.values
    made = (values[index].producer for index in masks)
    reasons = {producer: "its mask decides a shape" for producer in made if producer is not None}
    if first_doubtful is None:
        return reasons
    halves = recording.positions[:first_doubtful], recording.positions[first_doubtful:]
    early, late = ({p.ref.index for p in part if isinstance(p.ref, ValueRef)} for part in halves)
    late = {index for index in late - early if not values[index].is_given}
    reason = "another call may save another tensor at this position"
    followers = {op.index: reason for op in recording.ops if late.intersection((*op.outputs, *op.reads))}
    return {**followers, **reasons}


def without_inaccessible(recording: Recording) -> Recording:
    """The recording, in which operators are refused whose inputs or results a later call would not find."""
    reasons = {op.index: _inaccessible(op, recording) for op in recording.ops if op.replayable}
    return recording.refuse({index: reason for index, reason in reasons.items() if reason is not None})


def _inaccessible(op: RecordedOp, recording: Recording) -> str | None:
    for index in op.needs:
        value = recording.values[index]
        if value.overwritten:  # Rule R4
            return f"{value.name} is overwritten in place"
        if value.origin == "captured" and index not in recording.saved:
            return f"it reads {value.name}, a tensor from outside the block that is neither an argument nor a buffer"
        if value.origin == "state" and index not in recording.saved:  # Rule R16
            return f"it reads {value.name}, a random generator's state that autograd does not save"
    for index in op.outputs:
        if index is not None and recording.values[index].overwritten:
            return f"{recording.values[index].name} is overwritten in place"
    return None
