"""Which values may come to hold Inf or a huge number, though they held none in the recorded call.

A mask hides nothing while no text is padded. The first padded batch may come thousands of steps later, when a lossy
codec holds the masked scores. A codec makes NaN of a group of elements with an Inf in it. If one element is -1e9, zero
is all that is left of the others. So the operators are asked which numbers they put in place of elements.
"""

from __future__ import annotations

from collections.abc import Collection

from ds_adacc.program.arguments import CONSTANTS, extract_numbers
from ds_adacc.program.known_functions import ATTENTION
from ds_adacc.program.recorded_op import RecordedOp
from ds_adacc.program.recording import Recording
from ds_adacc.record.masks import makes_all_of

_HUGE = 1e3  # beside activations; masks are of -1e4, -1e9, the least number of the dtype, or -inf
_PUT = frozenset(
    (
        *("masked_fill", "index_fill", "fill", "full", "full_like", "new_full"),
        *("scalar_tensor", "constant_pad_nd"),
    )
)  # a number in place of elements
# The results of these are moderate, although they read what a mask has filled.
_MODERATE = frozenset(
    (
        *("_softmax", "_safe_softmax", "exp", "exp2", "sigmoid", "tanh", "erf", "relu", "reciprocal"),
        *("clamp", "clamp_min"),  # if they have a lower bound that is not huge itself
    )
)


def may_become_extreme(recording: Recording, infinite: Collection[int]) -> set[int]:
    """The values that may hold Inf or a huge number in some call; `infinite` held Inf or NaN in the recorded one.

    What Functions and compiled graphs do inside is not known. Their results are taken for moderate, as are those of
    fused attention. So are inputs and buffers.
    """
    found = set(infinite)
    for op in recording.ops:
        if not op.is_aten or ATTENTION in op.name or not (_puts_huge_number(op) or found.intersection(op.reads)):
            continue
        is_moderate = _is_moderate(op)
        made = [recording.values[index] for index in op.outputs if index is not None]
        for value in made:
            if value.geometry.dtype.is_floating_point and not (is_moderate and makes_all_of(value, op)):
                found.add(value.index)
    return found


def _puts_huge_number(op: RecordedOp) -> bool:
    return _name(op) in _PUT and _is_given_huge_number(op)


def _is_moderate(op: RecordedOp) -> bool:
    name = _name(op)
    if name.startswith("clamp") and (op.args[1:2] == (None,) or _is_given_huge_number(op)):
        return False
    return name in _MODERATE


def _name(op: RecordedOp) -> str:
    return op.short_name.rstrip("_")


def _is_given_huge_number(op: RecordedOp) -> bool:
    numbers: list[float] = []
    extract_numbers(CONSTANTS, (op.args, tuple(value for _, value in op.kwargs)), numbers)
    return not all(abs(number) < _HUGE for number in numbers)  # NaN is no number, and not below anything
