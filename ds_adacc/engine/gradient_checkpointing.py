"""Take Hugging Face's gradient checkpointing over: ds_adacc's blocks are served, and nothing is recomputed twice.

A transformers model enabled for it calls every layer through `_gradient_checkpointing_func`, an attribute of the layer
(of the model itself in code from the Hub). Its other half, a layer that is given no KV cache, stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from ds_adacc.log import get_logger


def replace_gradient_checkpointing(model: nn.Module, blocks: Collection[str]) -> None:
    """Have every enabled module that is, holds or lies in one of the named blocks call its layers plainly.

    Modules apart from the blocks keep their own checkpointing. One log line says if there was something to change.
    """
    taken = [m for name, m in model.named_modules() if _is_enabled(m) and any(_touch(name, block) for block in blocks)]
    for module in taken:
        module._gradient_checkpointing_func = _plainly
    if taken:
        get_logger().info("the model's gradient checkpointing is turned off: its blocks run under the plan instead")


def _is_enabled(module: nn.Module) -> bool:
    own = getattr(module, "_gradient_checkpointing_func", _plainly)
    return own is not _plainly and bool(getattr(module, "gradient_checkpointing", False))


def _touch(name: str, block: str) -> bool:
    return name == block or _holds(name, block) or _holds(block, name)


def _holds(outer: str, inner: str) -> bool:
    return outer == "" or inner.startswith(f"{outer}.")


def _plainly(layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return layer(*args, **kwargs)
