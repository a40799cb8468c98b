"""Code of torch.compile in a block that is recorded: its kernels bypass the dispatcher, so none of it is replayed."""

from __future__ import annotations

import sys


class _Kernel:
    """In place of the operator that made a value, where a compiled kernel made it."""

    def __str__(self) -> str:
        return "kernel"

    def __call__(self) -> None:
        raise RuntimeError("a compiled kernel was recorded, and cannot be replayed; this is a bug in ds_adacc")


KERNEL = _Kernel()


def in_compiled_code() -> bool:
    """Whether compiled code is running, called by the block that is being recorded."""
    frame = sys._getframe(1)
    while frame is not None:
        place = frame.f_globals.get("__name__"), frame.f_code.co_name
        if place == ("torch._dynamo.eval_frame", "compile_wrapper"):
            return True
        if place == ("ds_adacc.record.capture", "capture"):  # compiled code that calls the block does not matter
            return False
        frame = frame.f_back
    return False
