"""Which values of a program get a gradient, as far as its operators tell."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ds_adacc.program.arguments import ParameterRef
from ds_adacc.program.recorded_op import RecordedOp
from ds_adacc.program.refusals import COLLECTIVE, OPAQUE
from ds_adacc.program.schema import written_values


def values_with_gradient(
    ops: Iterable[RecordedOp], given: Collection[int], possible: Collection[int]
) -> frozenset[int]:
    """The values that get a gradient: those `given`, and of the `possible` ones those that operators make of them."""
    found = set(given)
    for op in ops:
        if _has_gradients(op) or not found.isdisjoint(written_values(op) if op.detached else op.reads):
            found.update(index for index in _returned(op) if index is not None and index in possible)
    return frozenset(found)


def _returned(op: RecordedOp) -> tuple[int | None, ...]:
    """The outputs that may have a gradient: not what an `autograd.Function` has saved."""
    if not op.is_function:
        return op.outputs
    saved = op.func.place_of_saved
    return (*op.outputs[: saved.start], *op.outputs[saved.stop :])


def _has_gradients(op: RecordedOp) -> bool:
    """Whether what `op` makes has a gradient, whichever values it reads."""
    if op.detached:
        return False
    # Of a collective, or a higher-order operator, it is not recorded what it reads (`OperatorCall`).
    is_seen = op.detached is None or op.refusal in (OPAQUE, COLLECTIVE)
    return is_seen or any(isinstance(ref, ParameterRef) for ref in op.references)
