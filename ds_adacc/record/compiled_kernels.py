"""Code of torch.compile in a block that is recorded: its kernels bypass the dispatcher, so none of it is replayed."""

from __future__ import annotations

from ds_adacc.python_state.watch import COMPILED_CODE
from ds_adacc.record.frames import frames_of_block, place_of


class _Kernel:
    """In place of the operator that made a value, where a compiled kernel made it."""

    def __str__(self) -> str:
        return "kernel"

    def __call__(self) -> None:
        raise RuntimeError("a compiled kernel was recorded, and cannot be replayed; this is a bug in ds_adacc")


KERNEL = _Kernel()


def in_compiled_code() -> bool:
    """Whether compiled code is running, called by the block that is being recorded."""
    return any(place_of(frame) == COMPILED_CODE for frame in frames_of_block())
