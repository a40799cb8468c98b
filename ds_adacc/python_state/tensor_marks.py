"""The marks of tensors: what they look like. That of a parameter tells which one it is."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

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


def mark_of_tensor(tensor: torch.Tensor) -> Hashable:
    """The mark of a tensor that is no parameter. An unusual one, as of a subclass, is known by identity."""
    if not has_tensor_mark(tensor):
        return identity_mark(tensor)
    return looks_of(tensor)


def mark_of_parameter(parameter: torch.Tensor) -> tuple[Hashable, bool, torch.dtype]:
    """The mark of a parameter, without its shape: under ZeRO-3 that is the shape of a partition, or empty."""
    return identity_mark(parameter), parameter.requires_grad, parameter.dtype
