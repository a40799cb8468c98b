"""Python's call stack while a block is recorded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

_RECORDER = ("ds_adacc.record.capture", "capture")  # what called it is not the block's


def place_of(frame: FrameType) -> tuple[str | None, str]:
    """The Python module and the function that the frame is of."""
    return frame.f_globals.get("__name__"), frame.f_code.co_name


def frames_of_block() -> Iterator[FrameType]:
    """The calls under way within the block that is being recorded, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and place_of(frame) != _RECORDER:
        yield frame
        frame = frame.f_back
