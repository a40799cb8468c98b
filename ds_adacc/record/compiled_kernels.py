"""Whether code of torch.compile runs in a block that is recorded. Its kernels bypass the dispatcher.

A graph is replayed as a whole (Rule R17). Nothing that runs outside of a graph is replayed (Rule R6).
"""

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


def in_guards() -> bool:
    """Whether Dynamo checks which of its code fits the call, in a function that it has generated.

    Some versions make tensors there of floats that vary, and read them again. It is no part of the block.
    """
    return any(frame.f_code.co_name == "guard" and "__name__" not in frame.f_globals for frame in frames_of_block())


def in_compiled_code() -> bool:
    """Whether compiled code is running, called by the block that is being recorded."""
    return any(place_of(frame) == COMPILED_CODE for frame in frames_of_block())
