"""Make blocks ZeRO-3 leaf modules: ZeRO-3 gathers all parameters of a block for its whole backward."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.utils.z3_leaf_module import apply_zero_leaf_module_config
from torch import nn

from ds_adacc.program.module_class import class_name, class_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # by position, and by keyword


def mixtures(model: nn.Module, blocks: Iterable[nn.Module], ds_config: Mapping[str, Any]) -> list[nn.Module]:
    """The blocks that are mixtures of experts, of which ranks may choose different ones.

    Experts are modules of one class in a list or dictionary of modules. A leaf module inside a block counts as experts
    too, whether `ds_config` or DeepSpeed's own list of classes makes it one, or a mark that it has already.
    """
    configured = ds_config.get("zero_optimization", {}).get("leaf_module")
    apply_zero_leaf_module_config(model, DeepSpeedZeroLeafModuleConfig.model_validate(configured or {}))
    return [block for block in blocks if any(map(_has_experts, block.modules()))]


def make_leaves(blocks: Iterable[nn.Module]) -> Callable[[], None]:
    """Mark the blocks as leaf modules. Call this before `deepspeed.initialize`. Returns what undoes it.

    DeepSpeed then reduces each block's gradients as one unit when its backward ends, with zeros for parameters that
    have none. So ranks may choose different experts. It fails if a block runs twice before its backward.
    """
    return _mark(blocks, _need_gradient)


def make_late_leaves(engine: DeepSpeedEngine, blocks: Mapping[str, nn.Module]) -> Callable[[], None]:
    """Mark the blocks of an existing engine as leaf modules: ZeRO-3 then gathers each block's parameters together.

    Returns what undoes the marks, for a model whose engine is given up.

    ZeRO-3's hooks are installed already. This removes them and installs them again, as DeepSpeed's own
    `unwrap_model_for_generation` does. Gradients are still reduced parameter by parameter.
    """
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    for hook in (*offload.forward_hooks, *offload.backward_hooks):
        hook.remove()
    offload.forward_hooks, offload.backward_hooks = [], []
    unmark = _mark(blocks.values(), _by_position)
    offload._register_deepspeed_module(offload.module)
    return unmark


def _mark(blocks: Iterable[nn.Module], hook: Callable[..., Arguments | None]) -> Callable[[], None]:
    """Mark the blocks as leaf modules, with this hook before their forwards. Returns what undoes it."""
    undo = ExitStack()
    for block in blocks:
        undo.callback(deepspeed.utils.set_z3_leaf_module, block, deepspeed.utils.z3_leaf_module(block))
        deepspeed.utils.set_z3_leaf_module(block, True)
        handle = block.register_forward_pre_hook(functools.partial(hook, _signature(block)), with_kwargs=True)
        undo.callback(handle.remove)
    return undo.close


def _has_experts(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return deepspeed.utils.z3_leaf_module(module)
    classes = Counter(class_of(child) for child in module.children() if any(True for _ in child.parameters()))
    return any(count > 1 for count in classes.values())


def _signature(block: Any) -> inspect.Signature:
    return inspect.signature(getattr(block, "_orig_mod", block).forward)


@torch._disable_dynamo
def _by_position(
    signature: inspect.Signature, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments | None:
    """Give the block its keyword arguments by position, if no positional one requires a gradient.

    DeepSpeed releases a module's parameters when the gradients of its positional arguments are ready. If none of them
    requires a gradient, it releases them when the whole backward has ended.
    """
    if not torch.is_grad_enabled() or _is_needed(args) or not _is_needed(kwargs.values()):
        return None
    bound = signature.bind(*args, **kwargs)
    return bound.args, bound.kwargs


@torch._disable_dynamo
def _need_gradient(
    signature: inspect.Signature, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments | None:
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
                f"adacc: the block {class_name(block)} takes no floating-point tensor by position, so ZeRO-3 "
                "would reduce its gradients before they are there; give it one by position, or list other classes in "
                "adacc.blocks"
            )
        given[first] = given[first].detach().requires_grad_()
    return tuple(given), bound.kwargs


def _is_needed(args: Iterable[Any]) -> bool:
    return any(isinstance(given, torch.Tensor) and given.requires_grad for given in args)
