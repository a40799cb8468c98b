"""DeepSpeed's checkpointing interface for models that wrap their blocks themselves, with or without an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ds_adacc.compiled import warn_of_graph_around
from ds_adacc.config import ConfigError, load, read
from ds_adacc.reach import name_of
from ds_adacc.runtime import Runtime


class _Face:
    """The one runtime of this process: `deepspeed.checkpointing` is configured per process, and so is its twin."""

    runtime: Runtime | None = None
    configured = False


def configure(mpu_: Any, deepspeed_config: str | os.PathLike[str] | Mapping[str, Any] | None = None) -> None:
    """Take the "adacc" section of `deepspeed_config` (a path or a dict) into use for `checkpoint`.

    `mpu_` is accepted as DeepSpeed's interface has it and not needed. No process group is needed. With
    `"enabled": false` `checkpoint` just calls the function. Raises ConfigError if there is no section or it is bad.
    """
    section = load(deepspeed_config)
    if section is None and not _is_disabled(deepspeed_config):
        raise ConfigError("adacc: the config has no such section; add it, or use deepspeed.checkpointing")
    _serve(Runtime(section) if section is not None else None, configured=True)


def is_configured() -> bool:
    """Whether `configure` or `ds_adacc.initialize` has set up checkpointing."""
    return _Face.configured


def reset() -> None:
    """Forget all records and plans, and the configuration with them."""
    _serve(None, configured=False)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, with what its backward needs recomputed, compressed or retained as planned.

    `function` is an `nn.Module`, a method of one, or any callable, also one made anew at every call. Returns what it
    returns. Raises RuntimeError before `configure`. A graph that torch.compile makes of the caller breaks here.
    """
    if torch.compiler.is_compiling():
        warn_of_graph_around(name_of(function))
    return _checkpoint(function, args, kwargs)


@torch._disable_dynamo
def _checkpoint(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if not _Face.configured:
        raise RuntimeError("ds_adacc.checkpointing.checkpoint called before configure(None, deepspeed_config=...)")
    if _Face.runtime is None:
        return function(*args, **kwargs)
    return _Face.runtime.checkpoint(function, *args, **kwargs)


def use(runtime: Runtime) -> None:
    """Serve `checkpoint` by the runtime of an engine."""
    _serve(runtime, configured=True)


def _serve(runtime: Runtime | None, configured: bool) -> None:
    if _Face.runtime is not None:
        _Face.runtime.abandon()
    _Face.runtime, _Face.configured = runtime, configured


def _is_disabled(source: Any) -> bool:
    return "adacc" in read(source)
