"""Replace functions of `deepspeed.checkpointing`, for scripts that call them themselves and must not change."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as deepspeeds

from ds_adacc import checkpointing
from ds_adacc.config import read
from ds_adacc.config.activation_checkpointing import Options
from ds_adacc.python_state.closure import with_modules

# As they are before anything is replaced: DeepSpeed itself may hold them, as the default of an argument.
CHECKPOINT, NON_REENTRANT, _CONFIGURE = deepspeeds.checkpoint, deepspeeds.non_reentrant_checkpoint, deepspeeds.configure
_PARTITION = deepspeeds.partition_activations_in_checkpoint


def patch_checkpointing() -> None:
    """Have DeepSpeed's `checkpoint` call ds_adacc's while an engine runs with it, and `configure` configure both.

    While there is no such engine, as where the config has no "adacc" section, DeepSpeed's own function runs. So it does
    for a function that reaches modules of other engines only.
    """
    deepspeeds.checkpoint, deepspeeds.non_reentrant_checkpoint = map(_handing_over, (CHECKPOINT, NON_REENTRANT))
    deepspeeds.configure = functools.wraps(_CONFIGURE)(_configure_both)
    deepspeeds.partition_activations_in_checkpoint = functools.wraps(_PARTITION)(_partition_both)


def _handing_over(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        runs = checkpointing.checkpoint if _may_be_of_engine(function, args, kwargs) else original
        return runs(function, *args, **kwargs)

    return checkpoint


@torch._disable_dynamo
def _may_be_of_engine(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return checkpointing.registry.may_be_of_engine(with_modules(function, args, kwargs))


def _configure_both(*args: Any, **kwargs: Any) -> None:
    _CONFIGURE(*args, **kwargs)
    given = inspect.signature(checkpointing.configure).bind(*args, **kwargs).arguments
    mpu, ds_config = given.pop("mpu_"), read(given.pop("deepspeed_config", None))
    registry = checkpointing.registry
    registry.configure(registry.section, Options.of(ds_config).overridden(**given), mpu)


def _partition_both(partition_activation: bool) -> None:
    _PARTITION(partition_activation)
    checkpointing.partition_activations_in_checkpoint(partition_activation)
