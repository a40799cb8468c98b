"""The interface of `deepspeed.checkpointing`, with the same names. It works with or without an engine.

To use it in a program written for `deepspeed.checkpointing`, change only the import line. The names for random number
generators are DeepSpeed's own objects. They are imported at first use, so `checkpoint` alone does not need DeepSpeed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_adacc.config import SECTION, AdaccConfig, origin, read, section_of
from ds_adacc.config.activation_checkpointing import ADVICE, Options, unknown_keys
from ds_adacc.config.activation_checkpointing import SECTION as OPTIONS
from ds_adacc.log import get_logger
from ds_adacc.profile.codec_maker import refuse_unusable
from ds_adacc.program.module_class import class_name
from ds_adacc.python_state.closure import name_of, with_modules
from ds_adacc.runtime.asked_functions import run_asked
from ds_adacc.runtime.runtime_registry import RuntimeRegistry

if TYPE_CHECKING:
    from deepspeed.runtime.activation_checkpointing.checkpointing import (
        CudaRNGStatesTracker,
        get_cuda_rng_tracker,
        model_parallel_cuda_manual_seed,
        model_parallel_reconfigure_tp_seed,
    )

_DEEPSPEEDS = (
    "CudaRNGStatesTracker",
    "get_cuda_rng_tracker",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    # Private there, but programs that come from Megatron read these three too: gpt-neox is one.
    "_CUDA_RNG_STATE_TRACKER",
    "_MODEL_PARALLEL_RNG_TRACKER_NAME",
    "_set_cuda_rng_state",
)

_RUNNER = "PipelineModule.forward.<locals>.exec_range_func.<locals>.exec_func"

__all__ = [
    "CheckpointFunction",
    "CudaRNGStatesTracker",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]


registry = RuntimeRegistry()  # of this process; the functions of this module and the engines use it


def configure(
    mpu_: Any,
    deepspeed_config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set up `checkpoint`. All ranks of a tensor-parallel group must call, with the same arguments.

    `deepspeed_config`, a path or a dict, contains the "adacc" and the "activation_checkpointing" section. An argument
    that is not None replaces its key of the "activation_checkpointing" section. Without an "adacc" section, its
    defaults are in force, but with codecs "none": lossy compression must be requested. With `"enabled": false`,
    `checkpoint` only calls the function. If `ds_adacc.initialize` has made an engine, `checkpoint` keeps using that
    engine's section, and this one once the engine is gone. A process group is needed only if activations are
    partitioned.

    * `mpu_`: DeepSpeed's model-parallel unit. None means the unit of an earlier call.
    * `partition_activations`: each rank of `mpu_`'s tensor-parallel group holds a share of the retained block inputs,
      and backward gathers them. The inputs must be the same on all ranks of the group.
    * `checkpoint_in_cpu`: retained block inputs on a CUDA device are held in host memory.
    * `contiguous_checkpointing`, `num_checkpoints`: no effect, because this module has no buffers of its own.
    * `synchronize`, `profile`: no effect, because backward replays operators in place of whole forwards, so there is no
      such time to measure. With an engine, `ds_adacc report` prints planned and observed seconds.

    The log names the options that are set and have no effect. Raises ConfigError for a bad section, or for codecs that
    cannot run here. Raises AssertionError, as DeepSpeed does, for contiguous buffers without partitions or without a
    number of layers. Whatever is raised, the configuration stays as it was.
    """
    ds_config = read(deepspeed_config)
    unknown = unknown_keys(ds_config)
    options = Options.of(ds_config).overridden(
        partition_activations=partition_activations,
        contiguous_checkpointing=contiguous_checkpointing,
        num_checkpoints=num_checkpoints,
        checkpoint_in_cpu=checkpoint_in_cpu,
        synchronize=synchronize,
        profile=profile,
    )
    section = section_of(ds_config)
    if section is not None:
        refuse_unusable(section)
    registry.forget_dropped()
    for line in unknown:
        get_logger().warning(line)
    if options.without_effect:
        get_logger().info("activation_checkpointing: ds_adacc ignores %s", ", ".join(options.without_effect))
    if section is not None and section.compact is not None and not registry.has_engines:
        get_logger().warning("adacc.compact has an effect with ds_adacc.initialize only: it changes the optimizer")
    if section is None and SECTION in ds_config:
        _log_disabled()
    elif section is None:
        section = _default_section()
    registry.configure(section, options, mpu_)
    registry.is_set_up = True
    if mpu_ is not None:
        _introduce(mpu_)


def is_configured() -> bool:
    """Whether `configure` or `ds_adacc.initialize` has set up checkpointing."""
    return registry.is_configured


def reset() -> None:
    """Do nothing. This module has no buffers that an evaluation without a backward fills. The configuration stays."""


def set_num_layers(nlayers: int) -> None:
    """Only write a line to the log. DeepSpeed sizes contiguous buffers by the number; this module has none."""
    get_logger().info("set_num_layers(%s) has no effect: ds_adacc keeps no contiguous buffers", nlayers)


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Set `configure`'s `partition_activations` from now on. All ranks of a tensor-parallel group must call."""
    registry.configure(registry.section, registry.options.overridden(partition_activations=partition_activation))
    get_logger().info("partition_activations: %s", partition_activation)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function(*args, **kwargs)`. The plan recomputes, compresses or retains the tensors that backward needs.

    `function` is an `nn.Module`, a method of one, or any callable; it may be a new object at every call. The result has
    DeepSpeed's form: a tuple or list becomes a tuple, or its item if it has only one; anything else is unchanged.
    Before `configure`, the settings are those of `configure` without a config. If torch.compile compiles the caller,
    its graph breaks here.
    """
    if torch.compiler.is_compiling():
        _warn_of_graph_around(name_of(function))
    return _in_deepspeeds_form(_run(function, args, kwargs))


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """The same as `checkpoint`, which is never reentrant: parameters get gradients even if no input requires one."""
    return checkpoint(function, *args)


class CheckpointFunction:
    """`checkpoint` with the interface of DeepSpeed's autograd.Function. The graph is that of plain autograd."""

    @staticmethod
    def apply(run_function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        """Append the outputs of `run_function(*args)` to `all_outputs`. Returns the tensor, or a tuple of tensors."""
        outputs = _run(run_function, args, {})
        if isinstance(outputs, torch.Tensor):
            all_outputs.append(outputs)
            return outputs
        all_outputs.extend(outputs)
        return tuple(output for output in outputs if isinstance(output, torch.Tensor))


def turn_off() -> None:
    """The section of an engine says `"enabled": false`: from now on `checkpoint` only calls the function.

    Not if `configure` or another engine has set it up. A line of log says which key it is.
    """
    _log_disabled()
    if not registry.is_configured:
        registry.configure(None)
        registry.is_set_up = True


def _log_disabled() -> None:
    get_logger().info('the "%s" section %s says "enabled": false: ds_adacc does nothing', SECTION, origin())


def log_options(ds_config: Mapping[str, Any]) -> None:
    """Log what DeepSpeed's "activation_checkpointing" section of an engine asks for and `configure` has not set.

    An engine does not read that section, neither DeepSpeed's nor with ds_adacc. Raises ConfigError if it is no object.
    """
    for line in unknown_keys(ds_config):
        get_logger().warning(line)
    ignored = Options.of(ds_config).beyond(registry.options)
    if ignored:
        text = f'these keys of "{OPTIONS}" have no effect, as ds_adacc decides what blocks hold: '
        advice = [f"In place of {name}, {ADVICE[name]}" for name in ignored if name in ADVICE]
        get_logger().info("%s%s", text, ". ".join([", ".join(ignored), *advice]))


def _before_configure() -> None:
    """Without `configure` and without an engine, a runtime with the default section serves."""
    if registry.runtime is None and not registry.is_configured:
        registry.configure(_default_section())


@torch._disable_dynamo
def _warn_of_graph_around(name: str) -> None:
    _before_configure()
    if (runtime := registry.runtime) is not None:
        runtime.warnings.compiled_around(name)


@torch._disable_dynamo
def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _before_configure()
    owner = _layers_run_by(function) or with_modules(function, args, kwargs)
    runtime = registry.runtime_of(owner)
    if runtime is None:
        return function(*args, **kwargs)
    return run_asked(runtime, owner, function, args, kwargs)


def _layers_run_by(function: Any) -> Callable[..., Any] | None:
    """The layers that `function` runs, if a PipelineModule made it for `activation_checkpoint_func`; else None.

    The PipelineModule makes a new function for each micro-batch. Its closure holds the whole stage and the number of
    the micro-batch. Neither is part of the block; only the layers are.
    """
    if getattr(function, "__qualname__", "") != _RUNNER:
        return None
    held = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__), strict=True))
    start, end = held["start"], held["end"]
    layers = held["self"].forward_funcs[start:end]
    owner = functools.partial(_pipeline_layers, start, end, *layers)
    owner.__qualname__ = _name_of_layers(held["self"]._local_start + start, layers)  # type: ignore[attr-defined]
    return owner


def _pipeline_layers(start: int, end: int, *layers: Callable[..., Any]) -> None:
    """Represents the layers from `start` to `end` of a stage as one block. It is never called."""


def _name_of_layers(first: int, layers: Sequence[Callable[..., Any]]) -> str:
    """What to call these layers: "layers.4-7 (Block)". `first`: the number of the first in the whole pipeline."""
    numbers = f"{first}-{first + len(layers) - 1}" if len(layers) > 1 else str(first)
    classes = (class_name(each) if isinstance(each, nn.Module) else name_of(each).split(".")[-1] for each in layers)
    return f"layers.{numbers} ({', '.join(dict.fromkeys(classes))})"


def _in_deepspeeds_form(outputs: Any) -> Any:
    if isinstance(outputs, tuple | list):
        return outputs[0] if len(outputs) == 1 else tuple(outputs)
    return outputs


def _default_section() -> AdaccConfig:
    if not registry.has_engines:
        get_logger().info('no "adacc" section: its defaults are in force, with "codecs": "none", which is lossless')
    return AdaccConfig.model_validate({"codecs": "none"})


def _introduce(mpu: Any) -> None:
    """Set `mpu` in DeepSpeed's module, where DeepSpeed's functions for random numbers look it up."""
    from deepspeed.runtime.activation_checkpointing import checkpointing as deepspeeds

    deepspeeds.mpu = mpu


def __getattr__(name: str) -> Any:
    if name in _DEEPSPEEDS:
        from deepspeed.runtime.activation_checkpointing import checkpointing as deepspeeds

        return getattr(deepspeeds, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
