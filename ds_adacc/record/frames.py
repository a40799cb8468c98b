"""Python's call stack while a block is recorded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

_NOT_THE_USERS = ("torch", "ds_adacc")  # packages in which no read of data is the user's own
# What called these is not the block's.
_RECORDERS = (("ds_adacc.record.capture", "capture"), ("ds_adacc.record.follower", "follow"))


def module_and_function(frame: FrameType) -> tuple[str | None, str]:
    """The Python module and the function that the frame is of."""
    return frame.f_globals.get("__name__"), frame.f_code.co_name


def frames_of_block() -> Iterator[FrameType]:
    """The calls under way within the block that is being recorded, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and module_and_function(frame) not in _RECORDERS:
        yield frame
        frame = frame.f_back


def line_of_block() -> str:
    """The line that runs now, as `file.py:12 (function)`: the innermost that is not in torch."""
    for frame in frames_of_block():
        if (module_and_function(frame)[0] or "").split(".")[0] not in _NOT_THE_USERS:
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"
    return "a line that is not known"
