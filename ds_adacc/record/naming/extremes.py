"""Which values may come to hold Inf or a huge number, though they held none in the recorded call.

A mask hides nothing while no text is padded. The first padded batch may come thousands of steps later, when a lossy
codec holds the masked scores. A codec makes NaN of a group of elements with an Inf in it. If one element is -1e9, zero
is all that is left of the others. So the operators are asked which numbers they put in place of elements.

Memory that nothing writes to holds whatever was there before. A block may fill a part of what `empty` returns. A
kernel may pad rows: verifying tells (`replayable/uninitialised.py`). A value that a compiled graph saves is all memory
of a storage (`graphs.extents`), and what of it no saved tensor shows may never be written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ds_adacc.program.arguments import CONSTANTS, ValueRef, extract_numbers
from ds_adacc.program.geometry import Geometry, cover
from ds_adacc.program.known_functions import ATTENTION, SOFTMAX
from ds_adacc.program.recorded_op import RecordedOp
from ds_adacc.program.recording import Recording
from ds_adacc.program.refusals import UNINITIALISED
from ds_adacc.record.naming.masks import makes_all_of

_HUGE = 1e3  # beside activations; masks are of -1e4, -1e9, the least number of the dtype, or -inf
# These put a number in place of elements.
_PUT = ("masked_fill", "index_fill", "fill", "full", "full_like", "new_full", "scalar_tensor", "constant_pad_nd")
# The results of these are moderate, although they read what a mask has filled; if there are bounds, one from below.
_BOUNDS = ("clamp", "clamp_min")
_MODERATE = (*SOFTMAX, *_BOUNDS, "exp", "exp2", "sigmoid", "tanh", "erf", "relu", "reciprocal")
# In place, these write without reading what was there before.
_OVERWRITES = ("copy", "fill", "zero", "bernoulli", "exponential", "normal", "random", "uniform")


def may_become_extreme(
    recording: Recording, infinite: Collection[int] = (), partly_written: Iterable[int] = ()
) -> set[int]:
    """The values that may hold Inf or a huge number in some call; `infinite` held Inf or NaN in the recorded one.

    `partly_written`: as of `RecordedTensors`.

    What Functions and compiled graphs do inside is not known. Their results are taken for moderate, as are those of
    fused attention. So are inputs and buffers.
    """
    found = {*infinite, *_partly_saved(recording)}
    for op in recording.ops:
        if not op.is_aten or ATTENTION in op.name or not (_puts_huge_number(op) or found.intersection(op.reads)):
            continue
        is_moderate = _is_moderate(op)
        made = [recording.values[index] for index in op.makes]
        for value in made:
            if value.geometry.dtype.is_floating_point and not (is_moderate and makes_all_of(value, op)):
                found.add(value.index)
    return found | _unwritten(recording, partly_written)


def _unwritten(recording: Recording, partly_written: Iterable[int]) -> set[int]:
    """The values that hold memory to which nothing has written, or that torch's operators have computed from such."""
    found, written = set(partly_written), dict[int, set[Geometry]]()  # by value, the parts of what `empty` has returned
    for op in recording.ops:
        if op.refusal == UNINITIALISED:
            written.update((index, set()) for index in op.makes)
        if not op.is_aten:
            continue
        target = next(iter(op.args), None) if op.short_name.endswith("_") else dict(op.kwargs).get("out")
        filled = target if isinstance(target, ValueRef) and target.index in written else None
        others = {ref.index for ref in op.references if isinstance(ref, ValueRef) and ref is not filled}
        if others & (found | written.keys()):
            found.update(op.makes)
        elif filled is not None:
            reads_it = op.short_name.endswith("_") and op.functional_name not in _OVERWRITES
            parts = written[filled.index] | (set() if reads_it else {filled.geometry})
            if not cover(parts, recording.values[filled.index].geometry):
                written.update((index, parts) for index in op.makes)
    return found | written.keys()


def _partly_saved(recording: Recording) -> set[int]:
    """The values of compiled graphs of which some memory is in no saved tensor."""
    made = {index for op in recording.graph_ops for index in op.makes}
    views: dict[int, set[Geometry]] = {index: set() for index in recording.saved & made}
    for position in recording.positions:
        if position.value in views and isinstance(position.ref, ValueRef):
            views[position.ref.index].add(position.ref.geometry)
    return {index for index, seen in views.items() if not cover(seen, recording.values[index].geometry)}


def _puts_huge_number(op: RecordedOp) -> bool:
    return op.functional_name in _PUT and _is_given_huge_number(op)


def _is_moderate(op: RecordedOp) -> bool:
    name = op.functional_name
    if name in _BOUNDS and (op.args[1:2] == (None,) or _is_given_huge_number(op)):
        return False  # it has no bound from below, or a huge one
    return name in _MODERATE


def _is_given_huge_number(op: RecordedOp) -> bool:
    numbers: list[float] = []
    extract_numbers(CONSTANTS, (op.args, op.kwargs), numbers)
    return not all(abs(number) < _HUGE for number in numbers)  # NaN is no number, and not below anything
