"""Weights whose operators read what lies deeper: wrapped, as in torchao, or in an attribute, as in bitsandbytes."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


class Wrapping(torch.Tensor):
    """An int8 tensor with a scale for each row; `F.linear` restores it."""

    @staticmethod
    def __new__(cls, codes, scales):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype)

    def __init__(self, codes, scales):
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self):
        return ["codes", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, *_):
        return cls(inner["codes"], inner["scales"])

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, weight, bias = args
            return F.linear(x, weight.codes.to(x.dtype) * weight.scales, bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert func is torch.ops.aten.detach.default  # all that nn.Parameter needs
        return cls(args[0].codes, args[0].scales)


class Scaled(nn.Parameter):
    """An int8 parameter; an attribute has its scales."""


class OfScaled(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.weight.state.scales, self.bias)


def wrapping(inputs, outputs):
    """A linear layer whose frozen weight is a `Wrapping`."""
    layer = nn.Linear(inputs, outputs)
    layer.weight = nn.Parameter(Wrapping(*_quantized(layer.weight)), requires_grad=False)
    return layer


def scaled(inputs, outputs):
    """A linear layer whose frozen weight is a `Scaled`."""
    layer = OfScaled(inputs, outputs)
    codes, scales = _quantized(layer.weight)
    layer.weight = Scaled(codes, requires_grad=False)
    layer.weight.state = SimpleNamespace(scales=scales)
    return layer


def _quantized(weight):
    scales = weight.detach().abs().amax(1, keepdim=True) / 127
    return (weight.detach() / scales).round().to(torch.int8), scales
