"""Blocks that torch.compile runs: which they are, and where they may be compiled.

Hooks receive what a compiled graph saves only if they are set outside the graph. So a block is compiled inside its
hooks, and no graph may be compiled around it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule

from ds_adacc.program.module_class import class_name

_BY_ENGINE = "call engine.compile() after ds_adacc.initialize or ds_adacc.attach"


def is_compiled(function: Callable[..., Any]) -> bool:
    """Whether a call of `function`, a module or another callable, runs code that torch.compile compiled."""
    if isinstance(function, nn.Module) and (function._compiled_call_impl is not None or is_compiled(function.forward)):
        return True
    return hasattr(function, "_torchdynamo_orig_callable") and not getattr(function, "_torchdynamo_disable", False)


def refuse_compiled(model: nn.Module, blocks: Mapping[str, nn.Module], zero_stage: int) -> None:
    """Raise ValueError if a graph includes more than a block: a module around the block, or ZeRO-3's hooks on it.

    Under ZeRO-3 also if a block is what `torch.compile(module)` returns: DeepSpeed puts its own collection of
    parameters into each module, and such a module hands that on to the one inside. Its first forward would fail.
    """
    remedy = _BY_ENGINE if zero_stage == 3 else f"compile each block by itself, or {_BY_ENGINE}"
    for name, module in model.named_modules():
        inside = [block for block in blocks if block != name and block.startswith(name and f"{name}.")]
        if inside and is_compiled(module):
            raise ValueError(
                f"adacc: {name or 'the model'} ({class_name(module)}) is compiled as a whole, and the block "
                f"{inside[0]} with it; {remedy}"
            )
    for name, block in blocks.items() if zero_stage == 3 else ():
        if block._compiled_call_impl is not None:
            raise ValueError(
                f"adacc: the block {name} is compiled in place, and the hooks of ZeRO-3 with it; instead, {_BY_ENGINE}"
            )
        if isinstance(block, OptimizedModule):
            raise ValueError(
                f"adacc: torch.compile(module) has made the block {name}, and DeepSpeed cannot run such a module under "
                f"ZeRO-3; instead, {_BY_ENGINE}"
            )


def compile_blocks(blocks: Mapping[str, nn.Module], backend: Any, options: Mapping[str, Any]) -> None:
    """Compile the forward of every block. No block may be wrapped. Raises ValueError if a block is compiled already."""
    for name, block in blocks.items():
        if is_compiled(block):
            raise ValueError(f"adacc: the block {name} is compiled already; compile either the blocks or the engine")
    for block in blocks.values():
        forward, how = block.forward, {**options, "backend": backend}
        if isinstance(forward, types.MethodType):  # still a method, it is bound to a deep copy with the block
            compiled: Any = types.MethodType(torch.compile(forward.__func__, **how), forward.__self__)
        else:
            compiled = torch.compile(forward, **how)
        block.forward = compiled  # type: ignore[method-assign]
