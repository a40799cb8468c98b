"""Which values are masks: in every call they have at most two values, so that the codec "bits" holds them exactly.

The data of one call is no proof. Noise that drops nothing yet is all ones, and so is its moving average, which later
has many values. So a mask of floats must be proven by its operators: a Bernoulli draw makes zeros and ones, and these
operators make equal numbers of equal numbers, whatever the tensor. Most pointwise ones do not: on a CPU the last few
elements of a tensor are computed by other code than the rest, and may differ from the others in their last bit.
"""

from __future__ import annotations

import torch

from ds_adacc.kernels import is_two_valued
from ds_adacc.program.arguments import Constant, ValueRef
from ds_adacc.program.recorded_op import RecordedOp
from ds_adacc.program.recording import RecordedValue, Recording

_MOST_STEPS = 4  # from the draw to the mask; scaling dropout's noise takes one or two
_COPIES = ("clone", "_to_copy")
# By name, the numbers with which an operator rounds once, as IEEE 754 says. A sum has a factor for its second number:
# the product of the two is rounded or not, as the code likes, but exact if both are whole.
_NUMBERS = {
    **dict.fromkeys(("mul", "div"), (float, Constant)),
    **dict.fromkeys(("add", "sub", "rsub"), (Constant,)),
}


def is_mask(value: RecordedValue, recording: Recording, tensor: torch.Tensor) -> bool:
    """Whether `value`, whose data is `tensor`, is bools, or zeros and ones that were drawn and perhaps scaled."""
    if value.overwritten or value.nbytes == 0:
        return False
    if tensor.dtype is torch.bool:
        return True
    if not tensor.is_floating_point() or not value.geometry.is_dense or not _is_noise(value, recording):
        return False
    return is_two_valued(tensor.as_strided((value.geometry.numel,), (1,)))  # in memory order, as it may be transposed


def _is_noise(value: RecordedValue, recording: Recording) -> bool:
    """Whether a Bernoulli draw made all of it, or operators that make equal numbers of equal numbers did from one."""
    for _ in range(_MOST_STEPS):
        op = None if value.producer is None else recording.ops[value.producer]
        if op is None or not op.is_aten or not makes_all_of(value, op):
            return False
        if op.functional_name == "bernoulli":
            return True
        read = _read_alone(op)
        if read is None or not value.geometry.dtype.is_floating_point:
            return False
        value = recording.values[read.index]
        if read.geometry.dtype is not value.geometry.dtype:  # parts of its elements
            return False
    return False


def makes_all_of(value: RecordedValue, op: RecordedOp) -> bool:
    """Whether the operator that made `value` has written all its elements, as one in place may not."""
    if not op.func._schema.is_mutable:
        return True
    target = next(iter(op.args), None)
    if not op.short_name.endswith("_") or not isinstance(target, ValueRef) or len(op.makes) > 1:
        return False  # it writes to another argument, to a list of them, or to one of several values of a storage
    whole, part = value.geometry, target.geometry
    return part.is_dense and part.span == whole.span and part.dtype is whole.dtype


def _read_alone(op: RecordedOp) -> ValueRef | None:
    """The only tensor that the operator reads, if it makes equal numbers of equal ones.

    A second one has many values, or may get them: a scale that is all ones now is trained.
    """
    name, tensors = op.functional_name, list(op.references)
    if len(tensors) != 1 or not isinstance(tensors[0], ValueRef) or tensors[0] is not op.args[0]:
        return None
    others = (*op.args[1:], *(value for _, value in op.kwargs))
    computes = name in _NUMBERS and all(isinstance(other, _NUMBERS[name]) for other in others)
    return tensors[0] if name in _COPIES or computes else None
