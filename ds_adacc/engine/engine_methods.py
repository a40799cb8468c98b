"""The methods of a DeepSpeed engine that ds_adacc patches: `HOOKS`, or `PIPELINE_HOOKS` for a pipeline. With CompAct,
`COMPACT_HOOKS` come on top.

Each entry takes the engine and its original method, and returns the replacement. `engine.adacc` must be set before.
The `step` of the engine's optimizer is patched too.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ds_adacc.compact.linear import PROXY
from ds_adacc.engine.save_load import loading, saving
from ds_adacc.report.monitor import events
from ds_adacc.runtime.compiled_blocks import compile_blocks
from ds_adacc.runtime.wrap import runs, unwrap_blocks, wrap_blocks

Method = Callable[..., Any]
_ORIGINAL = "ds_adacc_original"


def patch_engine(engine: Any, is_pipeline: bool) -> None:
    """Replace the methods of the engine that the list names. If any is missing, none is replaced."""
    hooks = PIPELINE_HOOKS if is_pipeline else HOOKS
    if engine.adacc.compact is not None:
        hooks = {**hooks, **COMPACT_HOOKS}
    replaced = {name: hook(engine, getattr(engine, name)) for name, hook in hooks.items()}
    if not is_pipeline and hasattr(engine.optimizer, "step"):  # an engine that only evaluates has none
        patch_optimizer(engine)
    for name, method in replaced.items():
        setattr(engine, name, method)


def patch_optimizer(engine: Any) -> None:
    """Replace the `step` of the engine's optimizer by that of `ending_step_of_optimizer`."""
    restore_optimizer(engine)
    optimizer = engine.optimizer
    # A method, as torch's schedulers want one.
    optimizer.step = types.MethodType(ending_step_of_optimizer(engine, optimizer.step), optimizer)


def restore_optimizer(engine: Any) -> None:
    """Undo `patch_optimizer` for an earlier engine that has had the engine's optimizer, or the one inside of it."""
    for optimizer in (engine.optimizer, engine.basic_optimizer):
        original = getattr(getattr(optimizer, "step", None), _ORIGINAL, None)
        if original is not None:
            optimizer.step = original


def ending_backward(engine: Any, original: Method) -> Method:
    """What ends `engine.backward` and, under ZeRO, `loss.backward()`. It also tells the step controller."""

    @functools.wraps(original)
    def backward_epilogue(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        engine.adacc.end_backward(engine.gradient_accumulation_steps())

    return backward_epilogue


def abandoning_on_failure(engine: Any, original: Method) -> Method:
    """`engine.backward`, which also tells the step controller if it has failed."""

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except BaseException:
            engine.adacc.runtime.controller.abandon()
            raise

    return backward


def ending_step(engine: Any, original: Method) -> Method:
    """`engine.step`, which also ends the step of ds_adacc if this call ran the optimizer.

    Before the last micro-batch of gradient accumulation, `engine.step` does not run the optimizer. It does not apply a
    step that has overflown.
    """

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        before, compact = engine.global_steps, engine.adacc.compact
        of_step = None if compact is None else compact.rates_of(engine.optimizer)  # the schedule moves within the call
        engine.adacc.runtime.controller.end_pending_pass()
        with engine.adacc.stepping():
            result = original(*args, **kwargs)
        if engine.global_steps != before:
            if engine.was_step_applied():
                engine.adacc.runtime.controller.note_update()
                if of_step is not None:
                    compact.end_step(engine, of_step)
            engine.adacc.end_step()
            if engine.monitor.enabled:
                engine.monitor.write_events(events(engine.adacc.runtime.controller, engine.global_samples))
        return result

    return step


def ending_step_of_optimizer(engine: Any, original: Method) -> Method:
    """`step` of the engine's optimizer. Called by the program itself, as Lightning Fabric does, it ends the step.

    Raises RuntimeError if the section has "compact".
    """

    known = weakref.ref(engine)  # a program's own optimizer may outlive it

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
        adacc.runtime.controller.end_pending_pass()
        result = original(*args, **kwargs)
        adacc.runtime.controller.note_update()
        adacc.end_step()
        return result

    setattr(step, _ORIGINAL, original)
    return step


def ending_batch(engine: Any, original: Method) -> Method:
    """`train_batch` of a pipeline, which runs all forwards and backwards of a step, and then the optimizer."""
    stepped = ending_step(engine, original)

    @functools.wraps(original)
    def train_batch(*args: Any, **kwargs: Any) -> Any:
        engine.adacc.runtime.agreement.budget.begin()  # a pipeline does not call the engine
        try:
            return stepped(*args, **kwargs)
        except BaseException:
            engine.adacc.runtime.controller.abandon()
            raise

    return train_batch


def compiling_blocks_first(engine: Any, original: Method) -> Method:
    """`engine.compile`, which compiles every block by itself, inside its hooks, and then the code around the blocks.

    Blocks that a later engine of the model has taken over stay as that one has left them.
    """

    @functools.wraps(original)
    def compile(*args: Any, **kwargs: Any) -> None:
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

    return compile


def exporting(engine: Any, original: Method) -> Method:
    """What makes a state dict of the model, such as `module_state_dict`: under the model's own names only.

    With `exclude_frozen_parameters` it has the weights that CompAct trains, which to DeepSpeed are frozen.
    """

    @functools.wraps(original)
    def export(*args: Any, **kwargs: Any) -> Any:
        with engine.adacc.compact.weights_as_trained():
            state = original(*args, **kwargs)
        for name in engine.adacc.compact.layers if state is not None else ():
            state.pop(f"{name}.{PROXY}", None)
        return state

    return export


_ALWAYS = {"compile": compiling_blocks_first, "save_checkpoint": saving, "load_checkpoint": loading}
HOOKS: Mapping[str, Callable[[Any, Method], Method]] = {
    "backward": abandoning_on_failure,
    "_backward_epilogue": ending_backward,
    "step": ending_step,
    **_ALWAYS,
}
COMPACT_HOOKS: Mapping[str, Callable[[Any, Method], Method]] = {
    "module_state_dict": exporting,
    "_zero3_consolidated_16bit_state_dict": exporting,
}
PIPELINE_HOOKS: Mapping[str, Callable[[Any, Method], Method]] = {"train_batch": ending_batch, **_ALWAYS}
