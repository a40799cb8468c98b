"""Which operators may be replayed: those that give the same bits when they run again (Rule R9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ds_adacc.program.recorded_op import RecordedOp
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
        if op.is_aten:
            agrees = all(map(_same, made, replays()))
        else:  # Rule R15
            with Filled(PATTERNS[0]):
                first = replays()
            doubtful = [index for index, *pair in zip(op.outputs, made, first, strict=False) if not _is_whole(*pair)]
            tensors.partly_written.update(index for index in doubtful if index is not None)
            agrees = not doubtful or _agrees_where_written(made, first, replays)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"its replay fails: {type(error).__name__}: {error}"
    return None if agrees else "its replay gives other bits"


def _same(made: torch.Tensor | None, output: Any) -> bool:
    return made is None or same_bits(output, made)


def _is_whole(made: torch.Tensor | None, output: Any) -> bool:
    """Whether all of the tensor was written, as a replay on filled memory shows."""
    return made is None or (same_bits(output, made) and not shows_pattern(made))


def _agrees_where_written(
    made: Sequence[torch.Tensor | None], first: Sequence[Any], replays: Callable[[], Sequence[Any]]
) -> bool:
    with Filled(PATTERNS[1]):
        outputs = zip(made, zip(first, replays(), strict=False), strict=False)
    return all(real is None or differs_only_where_unwritten(real, filled) for real, filled in outputs)
