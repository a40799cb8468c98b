"""A Linear layer that saves the projection of its input in place of the input, and trains in the compressed space."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ds_adacc.compact.projection import project
from ds_adacc.compact.shared import Shared
from ds_adacc.program.parameters import whole_shape
from ds_adacc.program.registration import register_function

PROXY = "compact_update"  # the name of the proxy parameter among a layer's own

# ZeRO-3 puts a Function of its own in place of `F.linear`, which would save the input.
_linear = torch._C._nn.linear


class CompactLinear(nn.Linear):
    """An `nn.Linear` whose frozen weight W (m × n) is trained through a proxy parameter D (m × r), which is zero.

    Shamshoum et al., CompAct (NAACL 2025), algorithms 1 and 2; all matrices here are transposed, as `nn.Linear`'s are.
    The output x Wᵀ + b is exact, and so is x's gradient. Saved is z = x P, and D's gradient is (∂L/∂o)ᵀ z, which is the
    exact weight gradient times P. The optimizer sees D in place of W. After its step `boundary.add_update` adds D Pᵀ
    to W and sets D to zero.

    `ds_adacc_shared` projects for all layers that read the same tensor, with the same projection.
    `rows` and `columns` are the projection (`projection.draw`). They are buffers, so that they are read anew at each
    call, also by a replay and by compiled code. They are not saved in a state dict, and neither is D: both are zero or
    drawn again.
    """

    rows: Tensor
    columns: Tensor
    compact_update: nn.Parameter
    ds_adacc_shared: Shared  # guarded by identity: what it holds is no part of a program

    def forward(self, input: Tensor) -> Tensor:  # torch's name: it may be given by it
        if not torch.is_grad_enabled():
            return nn.functional.linear(input, self.weight, self.bias)
        # A graph of torch.compile projects once for layers with the same `rows` and `columns`: equal operators are one.
        shared = None if torch.compiler.is_compiling() else self.ds_adacc_shared
        return Project.apply(input, self.weight, self.bias, self.compact_update, self.rows, self.columns, shared)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={len(self.columns)}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(prefix + PROXY, None)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if prefix + PROXY in missing_keys:
            missing_keys.remove(prefix + PROXY)


def serve(layer: nn.Linear, rank: int, shared: Shared) -> CompactLinear:
    """Make this layer a `CompactLinear` of this rank, in place. Its projection must be drawn before it runs.

    `shared` is the same object for layers that read the same tensor; they must have the same projection.

    The class changes and the object stays: names, hooks and references to the layer remain valid.
    """
    weight = layer.weight
    outputs, features = whole_shape(weight)
    weight.requires_grad_(False)
    served: Any = layer
    served.__class__ = CompactLinear
    served.ds_adacc_shared = shared
    device = weight.device
    layer.register_parameter(PROXY, nn.Parameter(torch.zeros(outputs, rank, dtype=weight.dtype, device=device)))
    layer.register_buffer("rows", torch.zeros(features, dtype=torch.int64, device=device), persistent=False)
    layer.register_buffer("columns", torch.zeros(rank, dtype=torch.int64, device=device), persistent=False)
    return served


def unserve(layer: Any) -> None:
    """Make the layer the `nn.Linear` again that `serve` was given."""
    for name in (PROXY, "rows", "columns", "ds_adacc_shared"):
        delattr(layer, name)
    layer.__class__ = nn.Linear
    layer.weight.requires_grad_(True)


class Project(torch.autograd.Function):
    """The layer's forward and backward. Its operators are recorded one by one, so that z is a value of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        update: Tensor,
        rows: Tensor,
        columns: Tensor,
        shared: Shared | None,
    ) -> Tensor:
        output = _as_trained(x, weight, bias)
        # Under autocast the output tells in which dtype the product was computed.
        if not update.requires_grad:
            z = None
        elif shared is None:
            z = project(x.to(output.dtype), rows, columns)
        else:
            z = shared.project(id(update), x, rows, columns, output.dtype)
        ctx.save_for_backward(z, weight)  # saved as the parameter itself, which ZeRO-3 gathers again for backward
        return output

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]: torch gives a gradient for each output, so here one
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        z, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_input = None
        if needs[0]:
            of_input = flat.matmul(weight.to(gradient.dtype)).view(*gradient.shape[:-1], weight.shape[1])
        of_bias = flat.sum(0) if needs[2] else None
        of_update = flat.T.mm(z.reshape(-1, z.shape[-1])) if needs[3] else None
        return of_input, None, of_bias, of_update, None, None, None


def _as_trained(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The bits that torch computes where gradients reach the weight: then it multiplies all rows in one product.

    Without them it may use several, where an input's memory is in another order.
    """
    if x.dim() <= 2 or (bias is not None and x.is_contiguous()):
        return _linear(x, weight, bias)
    output = _linear(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], len(weight))
    return output if bias is None else output.add_(bias.to(output.dtype))


register_function(Project, replay="operators")
