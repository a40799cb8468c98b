"""Compiled code met while a block is recorded: its kernels pass the dispatcher by, so nothing of it is replayed."""

from __future__ import annotations

import sys


class _Kernel:
    """Stands for a compiled kernel that the dispatcher does not see."""

    def __str__(self) -> str:
        return "kernel"

    def __call__(self) -> None:
        raise RuntimeError("a compiled kernel is not replayed")


KERNEL = _Kernel()


def in_compiled_code() -> bool:
    """Whether a compiled callable runs now, called by the block that is being recorded."""
    frame = sys._getframe(1)
    while frame is not None:
        place = frame.f_globals.get("__name__"), frame.f_code.co_name
        if place == ("torch._dynamo.eval_frame", "compile_wrapper"):
            return True
        if place == ("ds_adacc.record.capture", "capture"):  # what compiled code calls the block does not matter
            return False
        frame = frame.f_back
    return False
