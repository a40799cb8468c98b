"""Other projects' fused kernels: what a call computes, guessed from the names of its class and of its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ds_adacc.program.function_operator import FunctionOperator, arguments_of
from ds_adacc.program.recorded_op import RecordedOp

ATTENTION = "scaled_dot_product"  # how the names of fused attention begin in ATen, without the underscore
SOFTMAX = ("_softmax", "_safe_softmax")  # operators of ATen
# By a part of a Function's name, the operator of ATen whose values have the same roles; the first that fits.
_COUNTERPARTS = {
    "attention": ATTENTION,
    "attn": ATTENTION,
    "linear": "linear",  # before the norm that TransformerEngine and flash-attn fuse with one
    "mlp": "linear",
    "dense": "linear",
    "norm": "rms_norm",
    "swiglu": "silu",
    "geglu": "gelu",
    "silu": "silu",
    "gelu": "gelu",
    "relu": "relu",
    "rope": "mul",
    "rotary": "mul",
}
# What fused attention's forward calls the tensors that it reads. Packed ones go by their first part.
_ATTENTION_ARGUMENTS = {
    "q": "query",
    "query": "query",
    "qkv": "query",
    "k": "key",
    "key": "key",
    "kv": "key",
    "v": "value",
    "value": "value",
}


def aten_counterpart(cls: type[torch.autograd.Function]) -> str | None:
    """The operator of ATen that the Function is like, by its name."""
    return _counterpart(cls.__name__)


def is_attention(cls: type[torch.autograd.Function]) -> bool:
    """Whether the Function is fused attention, by its name."""
    return aten_counterpart(cls) == ATTENTION


def roles_by_name(cls: type[torch.autograd.Function]) -> Mapping[str, str]:
    """By name of an argument of forward, the role of the tensor that it is; empty if that is not known."""
    return _ATTENTION_ARGUMENTS if is_attention(cls) else {}


def length_bounds(op: RecordedOp) -> tuple[int, ...]:
    """The positions of those arguments that are the length of the longest of several texts, for fused attention.

    They say how much memory and how many threads a kernel takes, and change nothing else.
    """
    names = _names(op.func)
    given = enumerate(zip(names, op.args, strict=False))
    return tuple(i for i, (name, value) in given if name.startswith("max") and type(value) is int)


def _names(func: Any) -> tuple[str, ...]:
    """The names of the arguments of fused attention; empty for anything else."""
    if isinstance(func, FunctionOperator):
        return arguments_of(func.cls) if is_attention(func.cls) else ()
    schema = getattr(func, "_schema", None)
    is_fused = schema is not None and _counterpart(schema.name) == ATTENTION
    return tuple(argument.name for argument in schema.arguments) if is_fused else ()


def _counterpart(name: str) -> str | None:
    plain = name.lower().replace("_", "")
    return next((operator for part, operator in _COUNTERPARTS.items() if part in plain), None)
