"""The interface of `deepspeed.checkpointing`, name by name, with or without an engine.

A program written for it runs with the import line changed. The random number generators' names are DeepSpeed's own
objects, imported when used: `checkpoint` alone needs no DeepSpeed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ds_adacc.config import SECTION, AdaccConfig, load, read
from ds_adacc.config.activation_checkpointing import Options
from ds_adacc.execute.input_placement import InputPlacement, tensor_parallel_group
from ds_adacc.log import get_logger
from ds_adacc.plan.ranks import Ranks
from ds_adacc.record.closure import name_of
from ds_adacc.runtime.runtime import Runtime

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
    "use",
]


class _Checkpointing:
    """How this process checkpoints: `deepspeed.checkpointing` is configured per process, and so is its twin.

    `runtime` serves `checkpoint`: an engine's if `is_lent`, else one made for `section`, which is None before that, and
    where "enabled" is false.
    """

    def __init__(self) -> None:
        self.runtime: Runtime | None = None
        self.is_lent = False
        self.section: AdaccConfig | None = None
        self.is_configured = False
        self.options = Options()
        self.mpu: Any = None

    def serve_by(self, section: AdaccConfig | None) -> None:
        """By a runtime of one's own, without an engine. Shares of one tensor need one plan: those ranks agree on it."""
        runtime = None
        if section is not None:
            placement = self._placement()
            runtime = Runtime(section, Ranks(placement.group))
            runtime.controller.hold_inputs(placement)
        self._replace(runtime)
        self.is_lent, self.section = False, section

    def borrow(self, runtime: Runtime | None) -> None:
        """Serve by the runtime of an engine; None: as before any `configure`."""
        self._replace(runtime)
        self.is_lent, self.section = runtime is not None, None
        self.is_configured = runtime is not None
        if runtime is None:
            self.options, self.mpu = Options(), None
        else:
            self.place_inputs()

    def place_inputs(self) -> None:
        """Have the engine's runtime hold block inputs as the options say."""
        self.runtime.controller.hold_inputs(self._placement())

    def _replace(self, runtime: Runtime | None) -> None:
        if self.runtime is not None:
            self.runtime.controller.abandon()
        self.runtime = runtime

    def _placement(self) -> InputPlacement:
        group = tensor_parallel_group(self.mpu) if self.options.partition_activations else None
        return InputPlacement(group, bool(self.options.cpu_checkpointing))


_default = _Checkpointing()  # the one that the functions of this module speak to


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

    `deepspeed_config`, a path or a dict, gives the "adacc" and the "activation_checkpointing" section; an argument that
    is not None is taken in place of the latter's key. Without an "adacc" section its defaults are in force, but with
    codecs "none": nothing lossy is done unasked. With `"enabled": false` `checkpoint` just calls the function. An
    engine of `ds_adacc.initialize` goes on to serve `checkpoint` by its own section. No process group is needed, unless
    activations are partitioned.

    * `mpu_`: DeepSpeed's model-parallel unit, or None: the one given earlier.
    * `partition_activations`: each rank of `mpu_`'s tensor-parallel group holds a share of the retained block inputs,
      which are to be the same on all of them, and gathers them in backward.
    * `checkpoint_in_cpu`: retained block inputs that lie on a CUDA device wait in host memory.
    * `contiguous_checkpointing`, `num_checkpoints`: without effect, as nothing is held in buffers of this module's own.
    * `synchronize`, `profile`: without effect, as backward runs no block's forward again whose time could be told;
      `ds_adacc report` tells seconds planned and observed.

    What is set without effect is named in the log. Raises ConfigError for a bad section, AssertionError, as DeepSpeed
    does, for contiguous buffers without partitions or without a number of layers.
    """
    ds_config = read(deepspeed_config)
    options = Options.of(ds_config).overridden(
        partition_activations=partition_activations,
        contiguous_memory_optimization=contiguous_checkpointing,
        number_checkpoints=num_checkpoints,
        cpu_checkpointing=checkpoint_in_cpu,
        synchronize_checkpoint_boundary=synchronize,
        profile=profile,
    )
    section = load(ds_config)
    if mpu_ is not None:
        _introduce(mpu_)
    _default.options, _default.is_configured = options, True
    if options.without_effect:
        get_logger().info("activation_checkpointing: ds_adacc ignores %s", ", ".join(options.without_effect))
    if _default.is_lent:
        _default.place_inputs()
    elif section is None and SECTION in ds_config:
        _default.serve_by(None)
    else:
        _default.serve_by(section or _default_section())


def is_configured() -> bool:
    """Whether `configure` or `ds_adacc.initialize` has set up checkpointing."""
    return _default.is_configured


def reset() -> None:
    """Nothing: there are no buffers that an evaluation without a backward would fill. What is configured stays."""


def set_num_layers(nlayers: int) -> None:
    """Nothing but a line in the log: DeepSpeed sizes contiguous buffers by it, and there are none."""
    get_logger().info("set_num_layers(%s) has no effect: ds_adacc keeps no contiguous buffers", nlayers)


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Set `configure`'s `partition_activations` from now on. All ranks of a tensor-parallel group must call."""
    _default.options = _default.options.overridden(partition_activations=partition_activation)
    get_logger().info("partition_activations: %s", partition_activation)
    if _default.is_lent:
        _default.place_inputs()
    elif _default.section is not None:
        _default.serve_by(_default.section)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, with what its backward needs recomputed, compressed or retained as planned.

    `function` is an `nn.Module`, a method of one, or any callable, also one made anew at every call. What it returns
    comes back in DeepSpeed's form: of a tuple or list a tuple, or its item if there is but one; all else as it is.
    Before `configure` all is as `configure` without a config has it. A graph that torch.compile makes of the caller
    breaks here.
    """
    if torch.compiler.is_compiling():
        _warn_of_graph_around(name_of(function))
    return _in_deepspeeds_form(_run(function, args, kwargs))


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """`checkpoint`, which is never reentrant: parameters get their gradients though no input requires one."""
    return checkpoint(function, *args)


class CheckpointFunction:
    """`checkpoint` in the calling form of DeepSpeed's autograd.Function; the graph is that of plain autograd."""

    @staticmethod
    def apply(run_function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        """Append what `run_function(*args)` returns to `all_outputs`; returns the tensor, or a tuple of the tensors."""
        outputs = _run(run_function, args, {})
        if isinstance(outputs, torch.Tensor):
            all_outputs.append(outputs)
            return outputs
        all_outputs.extend(outputs)
        return tuple(output for output in outputs if isinstance(output, torch.Tensor))


def use(runtime: Runtime | None) -> None:
    """Serve `checkpoint` by the runtime of an engine; None: as before any `configure`."""
    _default.borrow(runtime)


def _serving() -> Runtime | None:
    """The runtime that serves `checkpoint`; before any `configure` one with the defaults."""
    if _default.runtime is None and not _default.is_configured:
        _default.serve_by(_default_section())
    return _default.runtime


@torch._disable_dynamo
def _warn_of_graph_around(name: str) -> None:
    if (runtime := _serving()) is not None:
        runtime.warn_of_graph_around(name)


@torch._disable_dynamo
def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    runtime = _serving()
    if runtime is None:
        return function(*args, **kwargs)
    layers = _layers_run_by(function)
    if layers is None:
        return runtime.checkpoint(function, *args, **kwargs)
    return runtime.run(runtime.blocks.of(layers), layers, function, args, kwargs)


def _layers_run_by(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The layers that a function runs which a PipelineModule gives to its `activation_checkpoint_func`; else None.

    It is made anew for each micro-batch, over the whole stage and the micro-batch's number: none of that is the block's
    own.
    """
    if getattr(function, "__qualname__", "") != _RUNNER:
        return None
    held = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__), strict=True))
    start, end = held["start"], held["end"]
    return functools.partial(_pipeline_layers, start, end, *held["self"].forward_funcs[start:end])


def _pipeline_layers(start: int, end: int, *layers: Callable[..., Any]) -> None:
    """Stands for the layers from `start` to `end` of a stage: it holds what they do, and is never called."""


def _in_deepspeeds_form(outputs: Any) -> Any:
    if isinstance(outputs, tuple | list):
        return outputs[0] if len(outputs) == 1 else tuple(outputs)
    return outputs


def _default_section() -> AdaccConfig:
    get_logger().info('no "adacc" section: its defaults are in force, with "codecs": "none", which is lossless')
    return AdaccConfig.model_validate({"codecs": "none"})


def _introduce(mpu: Any) -> None:
    """Make `mpu` known here and to DeepSpeed, whose functions for random numbers look it up in their own module."""
    from deepspeed.runtime.activation_checkpointing import checkpointing as deepspeeds

    _default.mpu = deepspeeds.mpu = mpu


def __getattr__(name: str) -> Any:
    if name in _DEEPSPEEDS:
        from deepspeed.runtime.activation_checkpointing import checkpointing as deepspeeds

        return getattr(deepspeeds, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
