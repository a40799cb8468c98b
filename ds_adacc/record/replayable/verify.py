"""Which operators may be replayed: those that give the same bits when they run again (Rule R9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ds_adacc.program.recorded_op import RecordedOp
from ds_adacc.program.refusals import UNINITIALISED
from ds_adacc.program.replay import replay
from ds_adacc.program.same_bits import same_bits
from ds_adacc.record.replayable.uninitialised import PATTERNS, Filled, differs_only_where_unwritten, shows_pattern
from ds_adacc.record.tensors import RecordedTensors


def difference(op: RecordedOp, tensors: RecordedTensors, parameters: Sequence[torch.Tensor]) -> str | None:
    """Why the operator must not be replayed: how its replay differs from what it has just made. None if it does not.

    What it has read and made is still alive. `tensors` are told which of it the operator has written only in part.
    """
    made = [None if index is None else tensors[index] for index in op.outputs]

    def replays() -> Sequence[Any]:
        return replay(op, tensors.__getitem__, parameters)

    try:
        if op.is_aten and not any(part.refusal == UNINITIALISED for part in op.parts):
            agrees = all(map(_same, made, replays()))
        else:  # Rule R15
            agrees = _agrees_on_filled(op, made, replays, tensors)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"its replay fails: {type(error).__name__}: {error}"
    return None if agrees else "its replay gives other bits"


def _same(made: torch.Tensor | None, output: Any) -> bool:
    return made is None or same_bits(output, made)


def _agrees_on_filled(
    op: RecordedOp,
    made: Sequence[torch.Tensor | None],
    replays: Callable[[], Sequence[Any]],
    tensors: RecordedTensors,
) -> bool:
    """Whether a replay gives the same bits, except in memory that a kernel which is not torch's leaves unwritten."""
    with Filled(PATTERNS[0]):
        first = replays()
    if all(map(_same, made, first)) and not any(shows_pattern(each) for each in made if each is not None):
        return True
    with Filled(PATTERNS[1]):
        found = [*zip(op.outputs, made, zip(first, replays(), strict=False), strict=False)]
    partly = [index for index, real, filled in found if index is not None and not all(_same(real, f) for f in filled)]
    tensors.partly_written.update(partly)
    if op.is_aten:
        return not partly
    return all(real is None or differs_only_where_unwritten(real, filled) for _, real, filled in found)
