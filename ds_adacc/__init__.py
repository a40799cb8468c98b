"""Adaptive activation checkpointing for DeepSpeed: recompute, compress, retain or offload, decided per tensor.

Begin with `ds_adacc.initialize`, or with `ds_adacc.attach` for an engine that exists.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_adacc import checkpointing
    from ds_adacc.engine.api import attach, initialize
    from ds_adacc.program.registration import register_function

__version__ = "0.1.0"
__all__ = ["__version__", "attach", "checkpointing", "initialize", "register_function"]


_HOMES = {
    "attach": "ds_adacc.engine.api",
    "checkpointing": "ds_adacc.checkpointing",
    "initialize": "ds_adacc.engine.api",
    "register_function": "ds_adacc.program.registration",
}


def __getattr__(name: str) -> Any:
    """What is here is imported when used: the planner, which shares this package, needs neither torch nor DeepSpeed."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(_HOMES[name])
    except (ImportError, AttributeError) as error:  # of an older DeepSpeed, say, which lacks a module
        hint = "`ds_adacc doctor` tells which package is missing, or has the wrong version"
        raise ImportError(f"ds_adacc.{name} cannot be imported: {type(error).__name__}: {error}. {hint}") from error
    return module if name == "checkpointing" else getattr(module, name)
