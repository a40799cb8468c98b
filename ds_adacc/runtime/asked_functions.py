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

from ds_adacc.execute.block import Block
from ds_adacc.program.arguments import tensors_in
from ds_adacc.python_state.closure import closure_of
from ds_adacc.python_state.covered import covered_by
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.runtime.wrap import runs, without_partials
from ds_adacc.whole_blocks.asked import Asked

_RELEASED = "ZeRO-3 releases its parameters before the call has ended. To have a plan for the modules that it calls, "
_WITH_ENGINE = "list their class names in adacc.blocks"
_WITHOUT_ENGINE = (
    "train with ds_adacc.initialize or ds_adacc.attach: it finds repeated layers, or those of adacc.blocks"
)


def run_asked(runtime: Runtime, owner: Callable[..., Any], function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run `function(*args, **kwargs)`, for which the program has asked for checkpointing. `owner`: as of `Runtime.run`.

    If it is the forward of one of the engine's blocks, the module's own hooks run around the block.
    """
    module, asked = _module_called(function), runtime.asked
    if module is not None and runs(runtime, module):
        with asked.during(module):
            return function(*args, **kwargs)
    block, run = runtime.blocks.of(owner), functools.partial(function, *args, **kwargs)
    if runtime.is_inside or not torch.is_grad_enabled():  # it holds nothing of its own
        return runtime.run(block, owner, function, args, kwargs, is_asked=True)
    if block.calls_blocks:
        calls = asked.calls
        with asked.during(None):
            output = run()
        if asked.calls == calls:  # as where the program has replaced its layer
            block.calls_blocks = None
        return output
    gathered, is_partitioned = asked.gathered, _is_partitioned(owner)
    # The forward of a module does more than to call one block.
    if (module is None or is_partitioned) and _may_call_blocks(block, runtime, owner):
        output = _try_its_blocks(block, owner, asked, run)
    elif is_partitioned:
        advice = _WITH_ENGINE if runtime.controller.has_engine else _WITHOUT_ENGINE
        output = runtime.run_by_torch(block, run, f"{_RELEASED}{advice}")
    else:
        output = runtime.run(block, owner, function, args, kwargs, is_asked=True)
    if asked.gathered > gathered:  # not in the first call perhaps, as where a layer is dropped at random
        block.calls_blocks = True
    return output


def _module_called(function: Callable[..., Any]) -> nn.Module | None:
    """The module that is called, or whose wrapped forward is, perhaps through a `functools.partial`."""
    function = without_partials(function)
    if isinstance(function, nn.Module):
        return function
    module = getattr(function, "__self__", None)
    if not isinstance(module, nn.Module):
        return None
    # Of a block that is compiled in place, the runtime runs the compiled call, and not its forward.
    is_run = function == module.__call__ or (function == module.forward and covered_by(function) is not None)
    return module if is_run else None


def _is_partitioned(owner: Callable[..., Any]) -> bool:
    """Whether ZeRO-3 partitions what it reaches. It does so with all of a model: the first parameters tell."""
    closure = closure_of(owner)
    firsts = (next(module.parameters(), None) for module in closure.modules)
    return any(hasattr(parameter, "ds_id") for parameter in (*firsts, *closure.tensors))


def _may_call_blocks(block: Block, runtime: Runtime, owner: Callable[..., Any]) -> bool:
    """Whether its call is to tell if it calls blocks of the engine. Its closure may hold the whole model."""
    if block.calls_blocks is None and not any(runs(runtime, module) for module in closure_of(owner).submodules()):
        block.calls_blocks = False
    return block.calls_blocks is None


def _try_its_blocks(block: Block, owner: Callable[..., Any], asked: Asked, run: functools.partial[Any]) -> Any:
    """Run its first call with the blocks that it calls, and note whether it only calls one."""
    given = {id(tensor) for tensor in (*tensors_in((run.args, run.keywords)), *closure_of(owner).tensors)}
    first = torch.autograd._get_sequence_nr()
    with asked.trying() as within:
        output = run()
    nodes = torch.autograd._get_sequence_nr() - first
    if nodes:  # else it has done nothing, as where a layer is dropped at random
        # A mask that the function makes is no node. A block would hold it, as its input.
        makes_nothing = nodes == within.nodes and given.issuperset(map(id, within.given))
        block.calls_blocks = within.count == 1 and makes_nothing
    return output
