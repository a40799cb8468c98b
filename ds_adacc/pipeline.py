"""What is particular to DeepSpeed's pipelines: the layers that a stage checkpoints, its ranks, its steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ds_adacc.log import get_logger

_RUNNER = "PipelineModule.forward.<locals>.exec_range_func.<locals>.exec_func"


def layers_run_by(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The layers that a function runs which a PipelineModule gives to its `activation_checkpoint_func`; else None.

    It is made anew for each micro-batch, over the whole stage and the micro-batch's number: none of that is the block's
    own.
    """
    if getattr(function, "__qualname__", "") != _RUNNER:
        return None
    held = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__), strict=True))
    start, end = held["start"], held["end"]
    return functools.partial(pipeline_layers, start, end, *held["self"].forward_funcs[start:end])


def pipeline_layers(start: int, end: int, *layers: Callable[..., Any]) -> None:
    """Stands for the layers from `start` to `end` of a stage: it holds what they do, and is never called."""


def take_over(module: Any, checkpoint: Callable[..., Any]) -> bool:
    """Whether a PipelineModule checkpoints ranges of its layers; then `checkpoint` does it in DeepSpeed's stead."""
    from deepspeed.runtime.activation_checkpointing import checkpointing as deepspeeds

    if module.activation_checkpoint_interval == 0:
        return False
    if module.activation_checkpoint_func in (deepspeeds.checkpoint, deepspeeds.non_reentrant_checkpoint):
        module.activation_checkpoint_func = checkpoint
        get_logger().info("the pipeline's activation_checkpoint_func is ds_adacc.checkpointing.checkpoint from now on")
    return True


def layer_classes(module: Any) -> set[str]:
    """The names of the classes of a PipelineModule's layers, those of all stages."""
    from deepspeed.pipe import LayerSpec

    classes = (layer.typename if isinstance(layer, LayerSpec) else type(layer) for layer in module._layer_specs)
    return {each.__name__ for each in classes}


def stage_ranks(engine: Any) -> list[int]:
    """The ranks that run the same layers as this one: only they need one plan, and hold as many micro-batches."""
    return engine.module.topology().filter_match(pipe=engine.stage_id)
