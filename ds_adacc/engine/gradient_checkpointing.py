"""Replace Hugging Face's gradient checkpointing by ds_adacc's, so that nothing is recomputed twice.

If gradient checkpointing is enabled, a model of transformers or diffusers calls every layer through
`_gradient_checkpointing_func`, an attribute of the layer (in diffusers and in code from the Hub, of the model).
ds_adacc replaces that function. Gradient checkpointing also withholds the KV cache from the layers; this stays as it
is.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import nn

from ds_adacc.log import get_logger
from ds_adacc.runtime.wrap import call_asked
from ds_adacc.whole_blocks.asked import ORIGINAL

_ENABLING = (
    "gradient_checkpointing_enable",
    "activation_checkpointing_enable",  # in newer versions of transformers
    "enable_gradient_checkpointing",  # in diffusers
)


def take_over_gradient_checkpointing(model: nn.Module, blocks: Collection[str]) -> None:
    """Replace gradient checkpointing now, and again whenever the program enables it: some do so after initialize.

    What was replaced for blocks of an earlier engine is put back first.
    """
    restore_gradient_checkpointing(model.modules())
    log_once = functools.cache(_log_replaced)  # once: some trainers turn it off and on around every evaluation
    if replace_gradient_checkpointing(model, blocks):
        log_once()
    for name, module in model.named_modules():
        inner = [block.removeprefix(f"{name}.") if name else block for block in blocks if _touch(name, block)]
        for method in _ENABLING:
            if hasattr(type(module), method):
                setattr(module, method, types.MethodType(_enabling(method, inner, log_once), module))


def restore_gradient_checkpointing(modules: Iterable[nn.Module]) -> None:
    """Undo `take_over_gradient_checkpointing`: layers for which it is enabled do it themselves again."""
    for module in modules:
        for method in _ENABLING:
            if hasattr(vars(module).get(method), ORIGINAL):
                delattr(module, method)
        if getattr(module, "_gradient_checkpointing_func", None) is call_asked:
            module._gradient_checkpointing_func = vars(module).pop(ORIGINAL)


def _enabling(name: str, blocks: Collection[str], log_once: Callable[[], None]) -> Callable[..., None]:
    """A method in place of transformers' method `name`, which replaces the checkpoint function again afterwards.

    It is given the model at each call. So a copied or pickled model works.
    """

    def enable(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        getattr(type(self), name)(self, *args, **kwargs)
        if replace_gradient_checkpointing(self, blocks):
            log_once()

    enable.__name__ = name
    setattr(enable, ORIGINAL, name)
    return enable


def _log_replaced() -> None:
    get_logger().info("the model's gradient checkpointing is turned off: its blocks run under the plan instead")


def replace_gradient_checkpointing(model: nn.Module, blocks: Collection[str]) -> bool:
    """Turn off gradient checkpointing in every module that is a named block, contains one or lies inside one.

    Such a module then calls its layers directly. All other modules keep their checkpointing. Returns whether any module
    was changed.
    """
    taken: list[Any] = [
        m for name, m in model.named_modules() if _is_enabled(m) and any(_touch(name, block) for block in blocks)
    ]
    for module in taken:
        setattr(module, ORIGINAL, module._gradient_checkpointing_func)
        module._gradient_checkpointing_func = call_asked
    return bool(taken)


def _is_enabled(module: nn.Module) -> bool:
    own = getattr(module, "_gradient_checkpointing_func", call_asked)
    return own is not call_asked and bool(getattr(module, "gradient_checkpointing", False))


def _touch(name: str, block: str) -> bool:
    return name == block or _holds(name, block) or _holds(block, name)


def _holds(outer: str, inner: str) -> bool:
    return outer == "" or inner.startswith(f"{outer}.")
