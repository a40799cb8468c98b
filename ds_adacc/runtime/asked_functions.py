"""What a program gives to `checkpoint`: a block of an engine, a function that calls such blocks, or another function.

A function that only calls one block of an engine is that block: what it reaches besides, which may be the whole model,
need not be read at each call.

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

from ds_adacc.execute.block import Block, RunsAs
from ds_adacc.python_state.closure import closure_of
from ds_adacc.python_state.covered import covered_by
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
    block, run = runtime.blocks.of(owner), functools.partial(function, *args, **kwargs)
    if runtime.is_inside or not torch.is_grad_enabled():  # it holds nothing of its own
        return runtime.run(block, owner, function, args, kwargs, is_asked=True)
    if block.runs_as is None:
        otherwise = RunsAs.BY_TORCH if _is_partitioned(owner) else RunsAs.BLOCK
        # The forward of a module does more than to call one block.
        may_be_its_blocks = module is None or otherwise is RunsAs.BY_TORCH
        if may_be_its_blocks and _reaches_blocks(runtime, owner):
            return _try_its_blocks(runtime, block, run, otherwise)
        block.runs_as = otherwise
    if block.runs_as is RunsAs.BY_TORCH:
        calls, output = runtime.asked.calls, runtime.run_by_torch(block, run, _RELEASED)
        if runtime.asked.calls > calls:  # its first call has left its blocks out, as LayerDrop does
            block.runs_as = RunsAs.ITS_BLOCKS
        return output
    if block.runs_as is RunsAs.ITS_BLOCKS:
        with runtime.asked.during(None):
            return run()
    return runtime.run(block, owner, function, args, kwargs, is_asked=True)


def _module_called(function: Callable[..., Any]) -> nn.Module | None:
    """The module that is called, or whose wrapped forward is, perhaps through a `functools.partial`."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, nn.Module):
        return function
    module = getattr(function, "__self__", None)
    if not isinstance(module, nn.Module):
        return None
    # Of a block that is compiled in place, the runtime runs the compiled call, and not its forward.
    is_run = function == module.__call__ or (function == module.forward and covered_by(function) is not None)
    return module if is_run else None


def _reaches_blocks(runtime: Runtime, owner: Callable[..., Any]) -> bool:
    """Whether it may call blocks of the engine. Its closure may hold the whole model, so only its call tells."""
    return any(runs(runtime, module) for module in closure_of(owner).submodules())


def _is_partitioned(owner: Callable[..., Any]) -> bool:
    """Whether ZeRO-3 partitions a parameter that it reaches."""
    return any(hasattr(parameter, "ds_id") for parameter in closure_of(owner).parameters)


def _try_its_blocks(runtime: Runtime, block: Block, run: functools.partial[Any], otherwise: RunsAs) -> Any:
    """Run its first call with the blocks that it calls, and decide what it is from then on.

    `otherwise`: what it is if those blocks do not take its place.
    """
    asked = runtime.asked
    calls, nodes, first = asked.calls, asked.nodes, torch.autograd._get_sequence_nr()
    with asked.during(None):
        output = run()
    calls, nodes, every = asked.calls - calls, asked.nodes - nodes, torch.autograd._get_sequence_nr() - first
    is_its_blocks = calls > 0 if otherwise is RunsAs.BY_TORCH else calls == 1 and nodes == every
    if every:  # else it has done nothing, as a layer that is dropped at random
        block.runs_as = RunsAs.ITS_BLOCKS if is_its_blocks else otherwise
    return output
