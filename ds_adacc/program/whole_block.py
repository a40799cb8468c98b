"""A block as one operator of a program: its whole forward, which only a second forward can run again (Rule R20)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WholeBlock:
    """Stands where ATen's operators stand in a `RecordedOp`. It only names the block: a call runs it, not a replay.

    `class_name`: as of `Block.class_name`.
    """

    class_name: str

    def __str__(self) -> str:
        return f"block.{self.class_name.replace('.', '_')}"
