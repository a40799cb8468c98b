"""The role of each value: what it is to the layer that saves it, read off the recorded operators.

The role decides which codecs are offered for the value (section 3.2 of the Adacc paper).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ds_adacc.program.arguments import ValueRef
from ds_adacc.program.geometry import Geometry
from ds_adacc.program.known_functions import ATTENTION, SOFTMAX, aten_counterpart
from ds_adacc.program.recorded_op import RecordedOp
from ds_adacc.program.recording import RecordedValue, Recording
from ds_adacc.program.registration import roles_of_function
from ds_adacc.record.compiled_kernels import KERNEL
from ds_adacc.record.naming.extremes import may_become_extreme
from ds_adacc.record.naming.masks import is_mask
from ds_adacc.record.tensors import RecordedTensors

_BATCHED = ("bmm", "baddbmm")
_MOST_POINTWISE = 6  # operators between a score and its softmax: scale, mask
_NORM = ("native_layer_norm", "_fused_rms_norm", "rms_norm", "native_group_norm")

# By an operator's name, the role of what it reads. Attention reads a query, a key and a value.
READ_AS = {
    **dict.fromkeys(SOFTMAX, "score"),
    **dict.fromkeys(_NORM, "layernorm"),
    **dict.fromkeys(("gelu", "silu", "relu", "sigmoid", "tanh", "mish", "elu", "leaky_relu", "hardswish"), "gelu"),
    **dict.fromkeys(("mm", "addmm", "linear", "_linear"), "linear"),
}
_MADE_AS = {
    **dict.fromkeys(SOFTMAX, "softmax"),
    **dict.fromkeys(_NORM, "layernorm"),
    "project": "linear",  # of a Linear's input, which CompAct saves in place of the input
}
PARTS = ("query", "key", "value")
# A value that operators read or make in several roles has the first of these.
STRONGEST_FIRST = (*PARTS, "softmax", "score", "statistic", "attention", "block_input", "layernorm", "gelu", "linear")


def made_as(name: str) -> str | None:
    """The role of the main result of an operator of this name, if it has one of its own. Others are statistics."""
    return "attention" if ATTENTION in name else _MADE_AS.get(name)


def assign_roles(recording: Recording, tensors: RecordedTensors) -> Recording:
    """The recording with each value's role and channels, and whether it is `two_valued` or `moderate`.

    The data of a value that has died is not known. No codec is on offer for it.
    """
    readers: dict[int, list[tuple[RecordedOp, int, Geometry]]] = {}
    of_functions: dict[int, str] = {}  # what a Function reads goes before what another one makes
    for op in recording.ops:
        for slot, ref in enumerate(op.references):
            if isinstance(ref, ValueRef):
                readers.setdefault(ref.index, []).append((op, slot, ref.geometry))
        of_read, of_made = roles_of_function(op)
        of_functions.update({index: role for index, role in of_made.items() if index not in of_functions})
        of_functions.update(of_read)
    values, infinite = [], []
    for value in recording.values:
        tensor = tensors.at_hand(value.index)
        uses = readers.get(value.index, [])
        two_valued = tensor is not None and value.index in recording.saved and is_mask(value, recording, tensor)
        role = "dropout_mask" if two_valued else of_functions.get(value.index) or _role(value, recording, uses)
        is_whole = tensor is not None and not value.overwritten
        if is_whole and not _is_finite(tensor):
            infinite.append(value.index)
        channels = _channels(value, [g for _, _, g in uses])
        values.append(replace(value, role=role, two_valued=two_valued, moderate=is_whole, channels=channels))
    for index in may_become_extreme(recording, infinite, tensors.partly_written):
        values[index] = replace(values[index], moderate=False)
    return replace(recording, values=tuple(values))


def _role(value: RecordedValue, recording: Recording, uses: list[tuple[RecordedOp, int, Geometry]]) -> str:
    for op, slot, _ in uses:
        part = _attention_part(op, slot, value, recording)
        if part:
            return part
    roles = [READ_AS.get(_like(op)) for op, _, _ in uses]
    if value.producer is not None:
        roles.append(_role_of_result(value, recording.ops[value.producer], recording))
    if value.origin == "input":
        roles.append("block_input")
    return min(filter(None, roles), key=STRONGEST_FIRST.index, default="other")


def _role_of_result(value: RecordedValue, producer: RecordedOp, recording: Recording) -> str | None:
    if _is_compiled(producer):
        return "statistic" if _is_small(value, recording) else None
    role = made_as(_like(producer))
    return "statistic" if role and not _is_main_output(value, producer, recording) else role


def _like(op: RecordedOp) -> str:
    """The name of the operator of ATen whose values have the same roles."""
    return (op.is_function and aten_counterpart(op.func.cls)) or op.short_name


def _attention_part(op: RecordedOp, slot: int, value: RecordedValue, recording: Recording) -> str | None:
    """Query, key or value, if `op` is attention and reads it there."""
    is_number = value.geometry.dtype.is_floating_point  # not where packed texts begin
    if is_number and ATTENTION in _like(op) and slot < 3 and len(list(op.references)) >= 3:
        return PARTS[slot]
    if _like(op) in _BATCHED and value.producer is not None:
        product = recording.values[op.outputs[0]] if op.outputs and op.outputs[0] is not None else None
        if product is not None and _leads_to_softmax(product, recording):
            return PARTS[min(slot, 1)]
        if slot == 1 and _comes_from_softmax(op, recording):
            return "value"
    return None


def _leads_to_softmax(value: RecordedValue, recording: Recording) -> bool:
    """Whether `value` is a score: a softmax follows after a few pointwise operators."""
    frontier, steps = {value.index}, _MOST_POINTWISE
    for op in recording.ops[(value.producer or 0) + 1 :]:
        if frontier.intersection(op.reads):
            if _like(op) in SOFTMAX:
                return True
            if torch.Tag.pointwise not in getattr(op.func, "tags", ()) or steps == 0:
                return False
            steps -= 1
            frontier.update(op.makes)
    return False


def _comes_from_softmax(op: RecordedOp, recording: Recording) -> bool:
    """Whether the first factor of a batched product is a softmax's output, or that after dropout."""
    factor = op.reads[0] if op.reads else None
    for _ in range(4):  # dropout and casts may lie between
        producer = recording.values[factor].producer if factor is not None else None
        if producer is None:
            return False
        maker = recording.ops[producer]
        if _like(maker) in SOFTMAX:
            return True
        factor = maker.reads[0] if maker.reads else None
    return False


def _is_compiled(op: RecordedOp) -> bool:
    return op.func is KERNEL or op.is_graph


def _is_main_output(value: RecordedValue, producer: RecordedOp, recording: Recording) -> bool:
    """Whether `value` is the largest output of its operator; the smaller ones are statistics."""
    sizes = [recording.values[index].nbytes for index in producer.makes]
    return value.nbytes == max(sizes)


def _is_small(value: RecordedValue, recording: Recording) -> bool:
    """Whether it has fewer elements than the block's largest input.

    Of what a compiled kernel made, often no more is known.
    """
    sizes = [each.geometry.numel for each in recording.inputs]
    return value.geometry.numel < max(sizes, default=math.inf)


def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    if tensor.dtype.itemsize == 1:  # torch cannot tell for most of these formats, and no codec takes them
        return True
    # Both are NaN if anything is. Unlike `torch.isfinite` this takes no memory.
    return all(math.isfinite(float(extreme)) for extreme in torch.aminmax(tensor))


def _channels(value: RecordedValue, views: list[Geometry]) -> int:
    """The longest last dimension under which the whole value is read as contiguous rows, or 1."""
    whole = value.geometry
    widest = 0
    for geometry in (whole, *views):
        rows_first = sorted(geometry.stride, reverse=True) == list(geometry.stride)
        same = geometry.dtype == whole.dtype and geometry.span == whole.span and geometry.start == 0
        if same and rows_first and geometry.is_dense and len(geometry.size) > 1 and geometry.numel == whole.numel:
            widest = max(widest, geometry.size[-1])
    if not widest and whole.is_dense and whole.size:
        widest = whole.size[whole.stride.index(min(whole.stride))]
    return max(widest, 1)
