"""A block as one operator of a program: its whole forward, which only a second forward can run again (Rule R20)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WholeBlock:
    """Stands where ATen's operators stand in a `RecordedOp`. It only names the block: a call runs it, not a replay.

    `class_name`: as of `Block.class_name`. `repeats_collectives`: whether its second forward calls collectives, its own
    or those by which ZeRO-3 gathers parameters. `writes_to`: the places of the buffers that it writes to, among the
    recording's.
    """

    class_name: str
    repeats_collectives: bool = False
    writes_to: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"block.{self.class_name.replace('.', '_')}{'.with_collectives' * self.repeats_collectives}"
