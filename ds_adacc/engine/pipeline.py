"""What is particular to DeepSpeed's pipelines: the layers that a stage checkpoints, its ranks, its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ds_adacc.log import get_logger


def replace_checkpoint_function(module: Any, checkpoint: Callable[..., Any]) -> bool:
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
