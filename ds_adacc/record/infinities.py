"""Which values may come to hold Inf, though they held none in the recorded call.

A mask of -inf hides nothing while no text is padded. The first padded batch may come thousands of steps later, when a
lossy codec holds what was masked, and codecs cannot take Inf. So the operators are asked: one that is given Inf as a
number may put it anywhere in its result.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from ds_adacc.program.arguments import extract_numbers
from ds_adacc.program.known_functions import ATTENTION
from ds_adacc.program.recorded_op import RecordedOp
from ds_adacc.program.recording import Recording

# Operators whose result is finite, although they read Inf where a mask put it.
_MAKE_FINITE = frozenset(
    (
        *("_softmax", "_safe_softmax", "exp", "exp2", "sigmoid", "tanh", "erf", "relu", "reciprocal"),
        *("clamp", "clamp_min", "nan_to_num", "isfinite", "isinf", "isnan"),
    )
)


def may_become_infinite(recording: Recording, infinite: Collection[int]) -> set[int]:
    """The values that may hold Inf in some call; `infinite` are those that held it in the recorded one.

    What Functions and compiled graphs do inside is not known. Their results are taken for finite, as are those of fused
    attention. So are inputs and buffers.
    """
    found = set(infinite)
    for op in recording.ops:
        if not op.is_aten or ATTENTION in op.name or op.short_name.rstrip("_") in _MAKE_FINITE:
            continue
        if _is_given_infinity(op) or not found.isdisjoint(op.reads):
            made = [recording.values[index] for index in op.outputs if index is not None]
            found.update(value.index for value in made if value.geometry.dtype.is_floating_point)
    return found


def _is_given_infinity(op: RecordedOp) -> bool:
    """Whether Inf or NaN is among the numbers that it computes with."""
    numbers: list[float] = []
    extract_numbers((float,), (op.args, tuple(value for _, value in op.kwargs)), numbers)
    return not all(map(math.isfinite, numbers))
