"""What stands in for a parameter in backward, with the parameter's attributes.

Autograd gives back the very tensor that was saved only if it needs no gradient. Otherwise it makes a new tensor, by
detaching what the unpack hook returns (`SavedVariable::unpack` in torch/csrc/autograd/saved_variable.cpp), and that has
no attributes. But Functions read and set attributes of what they saved: Megatron adds the gradient to
`weight.main_grad`, and sets `weight.grad_added_to_main_grad` for the optimizer to see.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


class StandIn(torch.Tensor):
    """What the unpack hook returns. Detached, it becomes a tensor of the parameter's type, data and attributes."""

    parameter: torch.Tensor

    @staticmethod
    def of(parameter: torch.Tensor) -> StandIn:
        """The stand-in for `parameter`, which autograd detaches at once."""
        made = torch.Tensor._make_subclass(StandIn, parameter.detach())
        made.parameter = parameter
        return made

    @classmethod
    # pyrefly: ignore [bad-override]: torch's stub lacks `func`
    def __torch_dispatch__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> torch.Tensor:
        # Autograd runs no other operator on what a hook returns: backward sees only what this one gives.
        if func is not torch.ops.aten.detach.default:
            raise RuntimeError(
                f"torch runs {func} on what an unpack hook returned, where ds_adacc expects a detach. Compiled "
                "autograd (torch._dynamo.config.compiled_autograd) does so, as it takes over the backward of the "
                'blocks: turn it off, or disable ds_adacc ("adacc": {"enabled": false})'
            )
        parameter = args[0].parameter
        alias = torch.Tensor._make_subclass(type(parameter), parameter.detach())
        alias.__dict__ = parameter.__dict__  # one dict: what backward sets is set on the parameter
        return alias
