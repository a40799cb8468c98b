"""The marks of tensors: what they look like. That of a parameter tells which one it is."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from ds_adacc.python_state.identity import identity_mark

stride_of = torch.Tensor.stride  # not `tensor.stride`, where Megatron's layers, and gpt-neox's, put a number of theirs


class TensorMark(NamedTuple):
    """The mark of a tensor: its data may change, the program does not depend on them.

    `is_conj`, `is_neg`: whether its elements are the conjugates, or the negatives, of what lies in its memory.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_conj: bool = False
    is_neg: bool = False


def looks_of(tensor: torch.Tensor) -> TensorMark:
    """The `TensorMark` of any tensor with strides."""
    t = tensor
    return TensorMark(t.shape, stride_of(t), t.dtype, t.device, t.requires_grad, t.is_conj(), t.is_neg())


def has_tensor_mark(value: Any) -> bool:
    """Whether it is a tensor whose mark is a `TensorMark`."""
    return type(value) is torch.Tensor and value.layout is torch.strided and not value.is_nested


def mark_of_parameter(parameter: torch.Tensor) -> tuple[Any, ...]:
    """The mark of a parameter: which one it is, and `looks_of_parameter`."""
    return identity_mark(parameter), *looks_of_parameter(parameter)


def looks_of_parameter(parameter: torch.Tensor) -> tuple[Any, ...]:
    """What a program depends on in a parameter. Its data may be given another layout, as by `channels_last`.

    Under ZeRO-3 its shape and strides are those of a partition, or of nothing, so they do not count.
    """
    known = parameter.requires_grad, parameter.dtype
    if hasattr(parameter, "ds_id") or is_lazy(parameter):
        return known
    if parameter.layout is not torch.strided or parameter.is_nested:
        return known
    return *known, parameter.shape, stride_of(parameter)


def version_of(tensor: torch.Tensor) -> int | None:
    """How often the tensor was written to; None if torch does not count that."""
    return None if tensor.is_inference() else tensor._version
