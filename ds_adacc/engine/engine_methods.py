"""The methods of a DeepSpeed engine that ds_adacc patches: `HOOKS`, or `PIPELINE_HOOKS` for a pipeline. With CompAct,
`COMPACT_HOOKS` come on top.

A hook runs in place of the engine's method. It is called with the engine, the method and what the method was given.
`engine.adacc` must be set before. The `step` of the engine's optimizer is patched too.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ds_adacc.compact.linear import PROXY
from ds_adacc.engine.monitor import events
from ds_adacc.engine.save_load import load_checkpoint, save_checkpoint
from ds_adacc.runtime.compiled_blocks import compile_blocks
from ds_adacc.runtime.wrap import runs, unwrap_blocks, wrap_blocks

Method = Callable[..., Any]
_ORIGINAL = "ds_adacc_original"


def patch_engine(engine: Any, is_pipeline: bool) -> None:
    """Replace the methods of the engine that the list names. If any is missing, none is replaced."""
    hooks = PIPELINE_HOOKS if is_pipeline else HOOKS
    if engine.adacc.compact is not None:
        hooks = {**hooks, **COMPACT_HOOKS}
    replaced = {name: hooked(engine, name, hook) for name, hook in hooks.items()}
    if not is_pipeline and hasattr(engine.optimizer, "step"):  # an engine that only evaluates has none
        patch_optimizer(engine)
    for name, method in replaced.items():
        setattr(engine, name, method)


def hooked(engine: Any, name: str, hook: Method) -> Method:
    """The engine's method of this name, with the hook in its place."""
    original = getattr(engine, name)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return hook(engine, original, *args, **kwargs)

    return method


def patch_optimizer(engine: Any) -> None:
    """Have a call of the optimizer's `step` by the program itself, as Lightning Fabric makes it, end the step.

    Such a call raises RuntimeError if the section has "compact".
    """
    restore_optimizer(engine)
    original, known = engine.optimizer.step, weakref.ref(engine)  # a program's own optimizer may outlive the engine

    @functools.wraps(original)
    def step(_: Any, *args: Any, **kwargs: Any) -> Any:
        engine = known()
        if engine is None or engine.adacc.is_stepping:
            return original(*args, **kwargs)
        adacc = engine.adacc
        if adacc.compact is not None:
            raise RuntimeError(
                "adacc.compact: the program calls optimizer.step(), which does not change the weights that CompAct has "
                'frozen; call engine.step(), or remove "compact" from the section'
            )
        adacc.controller.end_pending_pass()
        result = original(*args, **kwargs)
        adacc.note_update(engine)
        adacc.end_step()
        return result

    setattr(step, _ORIGINAL, original)
    engine.optimizer.step = types.MethodType(step, engine.optimizer)  # a method, as torch's schedulers want one


def restore_optimizer(engine: Any) -> None:
    """Undo `patch_optimizer` for an earlier engine that has had the engine's optimizer, or the one inside of it."""
    for optimizer in (engine.optimizer, engine.basic_optimizer):
        original = getattr(getattr(optimizer, "step", None), _ORIGINAL, None)
        if original is not None:
            optimizer.step = original


def end_backward(engine: Any, original: Method, *args: Any, **kwargs: Any) -> None:
    """What ends `engine.backward` and, under ZeRO, `loss.backward()`. It also tells the step controller."""
    original(*args, **kwargs)
    engine.adacc.end_backward(engine.gradient_accumulation_steps())


def abandon_on_failure(engine: Any, original: Method, *args: Any, **kwargs: Any) -> Any:
    """`engine.backward`, which also tells the step controller if it has failed."""
    try:
        return original(*args, **kwargs)
    except BaseException:
        engine.adacc.controller.abandon()
        raise


def end_step(engine: Any, original: Method, *args: Any, **kwargs: Any) -> Any:
    """`engine.step`, which also ends the step of ds_adacc if this call ran the optimizer.

    Before the last micro-batch of gradient accumulation, `engine.step` does not run the optimizer. It does not apply a
    step that has overflown.
    """
    before, compact = engine.global_steps, engine.adacc.compact
    of_step = None if compact is None else compact.rates_of(engine.optimizer)  # the schedule moves within the call
    engine.adacc.controller.end_pending_pass()
    engine.adacc.is_stepping = True
    try:
        result = original(*args, **kwargs)
    finally:
        engine.adacc.is_stepping = False
    if engine.global_steps != before:
        if engine.was_step_applied():
            engine.adacc.note_update(engine)
            if of_step is not None:
                compact.end_step(engine, of_step)
        engine.adacc.end_step()
        if engine.monitor.enabled:
            engine.monitor.write_events(events(engine.adacc.controller, engine.global_samples))
    return result


def end_batch(engine: Any, original: Method, *args: Any, **kwargs: Any) -> Any:
    """`train_batch` of a pipeline, which runs all forwards and backwards of a step, and then the optimizer."""
    engine.adacc.runtime.agreement.budget.begin()  # a pipeline does not call the engine
    return abandon_on_failure(engine, functools.partial(end_step, engine, original), *args, **kwargs)


def compile_blocks_first(engine: Any, original: Method, *args: Any, **kwargs: Any) -> None:
    """`engine.compile`, which compiles every block by itself, inside its hooks, and then the code around the blocks.

    Blocks that a later engine of the model has taken over stay as that one has left them.
    """
    given = inspect.signature(original).bind(*args, **kwargs)
    given.apply_defaults()
    if engine.is_deepcompile_enabled() or given.arguments["compiled_autograd_enabled"]:
        raise ValueError(
            "adacc: engine.compile() with compile.deepcompile or compiled_autograd_enabled takes over the backward "
            'of the blocks; turn that option off, or disable ds_adacc ("adacc": {"enabled": false})'
        )
    if not engine.is_compiled:
        runtime = engine.adacc.runtime
        blocks = {name: block for name, block in engine.adacc.blocks.items() if runs(runtime, block)}
        unwrap_blocks(blocks.values())
        try:
            compile_blocks(blocks, given.arguments["backend"], given.arguments["compile_kwargs"])
        finally:
            wrap_blocks(blocks, runtime)
    original(*args, **kwargs)


def export(engine: Any, original: Method, *args: Any, **kwargs: Any) -> Any:
    """What makes a state dict of the model, such as `module_state_dict`: under the model's own names only.

    With `exclude_frozen_parameters` it has the weights that CompAct trains, which to DeepSpeed are frozen.
    """
    with engine.adacc.compact.weights_as_trained():
        state = original(*args, **kwargs)
    for name in engine.adacc.compact.layers if state is not None else ():
        state.pop(f"{name}.{PROXY}", None)
    return state


_ALWAYS = {"compile": compile_blocks_first, "save_checkpoint": save_checkpoint, "load_checkpoint": load_checkpoint}
HOOKS: Mapping[str, Method] = {
    "backward": abandon_on_failure,
    "_backward_epilogue": end_backward,
    "step": end_step,
    **_ALWAYS,
}
COMPACT_HOOKS: Mapping[str, Method] = {
    "module_state_dict": export,
    "_zero3_consolidated_16bit_state_dict": export,
}
PIPELINE_HOOKS: Mapping[str, Method] = {"train_batch": end_batch, **_ALWAYS}
