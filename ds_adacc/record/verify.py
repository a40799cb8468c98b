"""Which operators may be replayed: those that give the same bits (Rule R9), and whose inputs every call can find."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ds_adacc.program.arguments import ValueRef
from ds_adacc.program.recorded_op import RecordedOp
from ds_adacc.program.recording import Recording
from ds_adacc.program.replay import replay
from ds_adacc.program.same_bits import same_bits
from ds_adacc.record.tensors import RecordedTensors
from ds_adacc.record.uninitialised import PATTERNS, Filled, differs_only_where_unwritten


def difference(op: RecordedOp, tensors: RecordedTensors, parameters: Sequence[torch.Tensor]) -> str | None:
    """Why the operator must not be replayed: how its replay differs from what it has just made. None if it does not.

    What it has read and made is still alive.
    """
    made = [None if index is None else tensors[index] for index in op.outputs]

    def replays() -> Sequence[Any]:
        return replay(op, tensors.__getitem__, parameters)

    try:
        if not op.is_function:
            agrees = all(map(_same, made, replays()))
        else:  # Rule R15
            with Filled(PATTERNS[0]):
                first = replays()
            agrees = all(map(_same, made, first)) or _agrees_where_written(made, first, replays)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"its replay fails: {type(error).__name__}: {error}"
    return None if agrees else "its replay gives other bits"


def _same(made: torch.Tensor | None, output: Any) -> bool:
    return made is None or same_bits(output, made)


def _agrees_where_written(
    made: Sequence[torch.Tensor | None], first: Sequence[Any], replays: Callable[[], Sequence[Any]]
) -> bool:
    with Filled(PATTERNS[1]):
        outputs = zip(made, zip(first, replays(), strict=False), strict=False)
    return all(real is None or differs_only_where_unwritten(real, filled) for real, filled in outputs)


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
