"""What one replay runs for one block: a segment of its program, with the block's own parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ds_adacc.program.recorded_op import RecordedOp


@dataclass(slots=True)
class Updates:
    """Counts the steps of the optimizer that have changed parameters. ZeRO writes them without raising `_version`."""

    count: int = 0


@dataclass(frozen=True, slots=True)
class BoundSegment:
    """A segment as one block replays it.

    `op`: its last operator. `reads`: the values that it reads, and `read_parameters` the indices of the parameters.
    `parameters` are those of the block, and `updates` counts their changes. `uses`: how often each output is used.
    `before`: the operators that are replayed for this one alone, in forward order, each with the outputs that nothing
    after it reads. What they read counts as read by this one.
    """

    op: RecordedOp
    before: tuple[tuple[RecordedOp, tuple[int | None, ...]], ...]
    reads: tuple[int, ...]
    parameters: Sequence[torch.Tensor]
    read_parameters: tuple[int, ...]
    uses: tuple[int, ...]
    updates: Updates
