"""Calls of what a program gives to `checkpoint`: a block of an engine, a function that calls such blocks, or another.

Within the call of a function, ZeRO-3 gathers the parameters of one module after the other, and releases them again. So
no replay for the function would find all of them. For an engine's block, it gathers them before the block's forward,
and again for its backward. So under ZeRO-3, a function that calls such blocks is no block itself: they are. Torch
checkpoints any other function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ds_adacc.execute.block import Block
from ds_adacc.python_state.closure import closure_of
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.runtime.wrap import call_asked, runs

_RELEASED = (
    "ZeRO-3 releases its parameters before the call has ended. To have a plan for the modules that it calls, train "
    "with ds_adacc.initialize or ds_adacc.attach, and list their class names in adacc.blocks"
)


def run_asked(runtime: Runtime, owner: Callable[..., Any], function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run `function(*args, **kwargs)`, for which the program has asked for checkpointing. `owner`: as of `Runtime.run`.

    If it is the forward of one of the engine's blocks, the module's own hooks run around the block.
    """
    module = _module_called(function)
    if module is not None and runs(runtime, module):
        return call_asked(function, *args, **kwargs)
    block = runtime.blocks.of(owner)
    is_part = runtime.is_inside or not torch.is_grad_enabled()  # it holds nothing of its own
    if is_part or not _is_partitioned(block, owner):
        return runtime.run(block, owner, function, args, kwargs, is_asked=True)
    if not _may_call_blocks(block, runtime, owner):
        return runtime.run_by_torch(block, functools.partial(function, *args, **kwargs), _RELEASED)
    before = runtime.calls
    with runtime.asked.during(None):
        output = function(*args, **kwargs)
    # Its closure may hold the whole model. Only its call tells which modules it calls.
    block.calls_blocks = runtime.calls > before
    return output


def _module_called(function: Callable[..., Any]) -> nn.Module | None:
    """The module that is called, or whose forward is, perhaps through a `functools.partial`."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, nn.Module):
        return function
    module = getattr(function, "__self__", None)
    return module if isinstance(module, nn.Module) and function in (module.__call__, module.forward) else None


def _is_partitioned(block: Block, owner: Callable[..., Any]) -> bool:
    """Whether ZeRO-3 partitions a parameter that it reaches. To look at all of them at each call would take long."""
    if block.is_partitioned is None:
        block.is_partitioned = any(hasattr(parameter, "ds_id") for parameter in closure_of(owner).parameters)
    return block.is_partitioned


def _may_call_blocks(block: Block, runtime: Runtime, owner: Callable[..., Any]) -> bool:
    """Whether it calls blocks of the engine, as far as is known before its call."""
    if block.calls_blocks is None and not any(runs(runtime, module) for module in closure_of(owner).submodules()):
        block.calls_blocks = False
    return block.calls_blocks is not False
