"""Every method of a DeepSpeed engine that ds_adacc patches, in one list: `HOOKS`, and `PIPELINE_HOOKS` for pipelines.

Each entry takes the engine and its own method, and returns the method in its place. The engine has its `adacc` by then.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ds_adacc.engine.checkpoint import loading, saving
from ds_adacc.report.monitor import events
from ds_adacc.runtime.compiled import compile_blocks
from ds_adacc.runtime.wrap import unwrap_blocks, wrap_blocks

Method = Callable[..., Any]


def patch_engine(engine: Any, is_pipeline: bool) -> None:
    """Replace the engine's methods."""
    for name, hook in (PIPELINE_HOOKS if is_pipeline else HOOKS).items():
        setattr(engine, name, hook(engine, getattr(engine, name)))


def ending_backward(engine: Any, original: Method) -> Method:
    """`engine.backward`: a forward and backward have ended, or failed."""

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        controller = engine.adacc.runtime.controller
        try:
            result = original(*args, **kwargs)
        except BaseException:
            controller.abandon()
            raise
        controller.end_backward()
        return result

    return backward


def ending_step(engine: Any, original: Method) -> Method:
    """`engine.step`: the optimizer step has ended, if this call took one: in the midst of accumulation it does not."""

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        before = engine.global_steps
        result = original(*args, **kwargs)
        if engine.global_steps != before:
            engine.adacc.end_step()
            if engine.monitor.enabled:
                engine.monitor.write_events(events(engine.adacc.runtime.controller, engine.global_samples))
        return result

    return step


def ending_batch(engine: Any, original: Method) -> Method:
    """`train_batch` of a pipeline: all forwards and backwards of a step, and the step."""
    stepped = ending_step(engine, original)

    @functools.wraps(original)
    def train_batch(*args: Any, **kwargs: Any) -> Any:
        try:
            return stepped(*args, **kwargs)
        except BaseException:
            engine.adacc.runtime.controller.abandon()
            raise

    return train_batch


def compiling_blocks_first(engine: Any, original: Method) -> Method:
    """`engine.compile`: every block is compiled by itself, inside its hooks, and then what is around them."""

    @functools.wraps(original)
    def compile(*args: Any, **kwargs: Any) -> None:
        given = inspect.signature(original).bind(*args, **kwargs)
        given.apply_defaults()
        if engine.is_deepcompile_enabled() or given.arguments["compiled_autograd_enabled"]:
            raise ValueError(
                "adacc: engine.compile() with compile.deepcompile or compiled_autograd_enabled takes over the backward "
                "of the blocks; turn that off, or adacc"
            )
        if not engine.is_compiled:
            blocks = engine.adacc.blocks
            unwrap_blocks(blocks)
            try:
                compile_blocks(blocks, given.arguments["backend"], given.arguments["compile_kwargs"])
            finally:
                wrap_blocks(blocks, engine.adacc.runtime)
        original(*args, **kwargs)

    return compile


_ALWAYS = {"compile": compiling_blocks_first, "save_checkpoint": saving, "load_checkpoint": loading}
HOOKS: Mapping[str, Callable[[Any, Method], Method]] = {"backward": ending_backward, "step": ending_step, **_ALWAYS}
PIPELINE_HOOKS: Mapping[str, Callable[[Any, Method], Method]] = {"train_batch": ending_batch, **_ALWAYS}
