"""Make blocks ZeRO-3 leaf modules: ZeRO-3 gathers all parameters of a block for its whole backward."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn


def make_leaves(blocks: Iterable[nn.Module]) -> None:
    """Mark the blocks as leaf modules. Call this before `deepspeed.initialize`."""
    for block in blocks:
        deepspeed.utils.set_z3_leaf_module(block, True)
        signature = inspect.signature(getattr(block, "_orig_mod", block).forward)
        block.register_forward_pre_hook(functools.partial(_need_gradient, signature), with_kwargs=True)


def make_late_leaves(engine: DeepSpeedEngine, blocks: Mapping[str, nn.Module]) -> None:
    """Mark the blocks of an existing engine as leaf modules: ZeRO-3 then gathers each block's parameters together.

    ZeRO-3's hooks are installed already. This removes them and installs them again, as DeepSpeed's own
    `unwrap_model_for_generation` does. Gradients are still reduced parameter by parameter.
    """
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    for hook in (*offload.forward_hooks, *offload.backward_hooks):
        hook.remove()
    offload.forward_hooks, offload.backward_hooks = [], []
    for block in blocks.values():
        deepspeed.utils.set_z3_leaf_module(block, True)
    offload._register_deepspeed_module(offload.module)


@torch._disable_dynamo
def _need_gradient(
    signature: inspect.Signature, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Make at least one positional argument require a gradient.

    DeepSpeed reduces a leaf module's gradients in a hook, which torch calls when the gradients of the positional
    arguments are ready. If no positional argument requires a gradient, as behind a frozen embedding, torch calls the
    hook before the module's backward, and DeepSpeed would reduce zeros. Raises ValueError if no positional argument can
    require a gradient.
    """
    if not torch.is_grad_enabled() or _is_needed(args) or not any(p.requires_grad for p in block.parameters()):
        return None
    bound = signature.bind(*args, **kwargs)
    given = list(bound.args)
    if not _is_needed(given):
        first = next((i for i, x in enumerate(given) if isinstance(x, torch.Tensor) and x.is_floating_point()), None)
        if first is None:
            raise ValueError(
                f"adacc: the block {type(block).__name__} takes no floating-point tensor by position; ZeRO-3 "
                "would reduce its gradients before they are there"
            )
        given[first] = given[first].detach().requires_grad_()
    return tuple(given), bound.kwargs


def _is_needed(args: Iterable[Any]) -> bool:
    return any(isinstance(given, torch.Tensor) and given.requires_grad for given in args)
