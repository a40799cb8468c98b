"""Python's call stack while a block is recorded."""

from __future__ import annotations

import dis
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from ds_adacc.python_state.codes import kept_by_code
from ds_adacc.record.block_call import BlockCall

_NOT_THE_USERS = ("torch", "ds_adacc", "threading", "concurrent")  # no read of data in these is the user's own
# The instructions with which `except`, `finally` and `with` begin to handle an error. The last two are those of 3.10.
_HANDLERS = frozenset({"PUSH_EXC_INFO", "SETUP_FINALLY", "SETUP_WITH"})
_CHECK = torch._check_tensor_all_with.__code__


def run_recorded(call: BlockCall) -> Any:
    """Run the block that is being recorded. What calls this function is not the block's."""
    return call.run()


def module_and_function(frame: FrameType) -> tuple[str | None, str]:
    """The Python module and the function that the frame is of."""
    return frame.f_globals.get("__name__"), frame.f_code.co_name


def frames_of_block() -> list[FrameType]:
    """The calls under way within the block that is being recorded, the innermost first; none where it does not run."""
    frames, frame = [], sys._getframe(1)
    while frame.f_code is not run_recorded.__code__:
        frames.append(frame)
        if frame.f_back is None:
            return []
        frame = frame.f_back
    return frames


def renew_copied_variables() -> None:
    """Let go of what variables of the block have held before.

    Before Python 3.13, to read the variables of a frame leaves a copy of them in it. To read them again renews that.
    """
    if sys.version_info < (3, 13):
        for frame in frames_of_block()[1:]:  # in a copy of this frame's, its own frame would hold itself
            len(frame.f_locals)


def may_catch_errors() -> bool:
    """Whether code of the block under way catches errors: what runs next may tell whether there was one."""
    return any(_catches(frame.f_code) for frame in frames_of_block() if not _is_not_the_users(frame))


def checks_for_error() -> bool:
    """Whether torch checks data for the block, and only raises an error if they fail (`torch._check_tensor_all`)."""
    return any(frame.f_code is _CHECK for frame in frames_of_block())


@kept_by_code
def _catches(code: CodeType) -> bool:
    return any(each.opname in _HANDLERS for each in dis.get_instructions(code))


def _is_not_the_users(frame: FrameType) -> bool:
    return (module_and_function(frame)[0] or "").split(".")[0] in _NOT_THE_USERS


def line_of_block() -> str:
    """The line that runs now, as `file.py:12 (function)`: the innermost that is in neither torch nor threading."""
    for frame in frames_of_block():
        if not _is_not_the_users(frame):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"
    return "a line that is not known"
