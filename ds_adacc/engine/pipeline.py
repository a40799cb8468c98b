"""Functions for DeepSpeed's pipelines only: what checkpoints the layers of a stage, and the classes of all layers."""

from __future__ import annotations

from typing import Any

from deepspeed.pipe import LayerSpec

from ds_adacc.checkpointing import checkpoint
from ds_adacc.engine.patch_checkpointing import CHECKPOINT, NON_REENTRANT
from ds_adacc.log import get_logger
from ds_adacc.program.module_class import class_of

_ORIGINAL = "_ds_adacc_original_checkpoint_func"  # the attribute that keeps what was replaced


def layers_checkpointed_at_once(module: Any) -> int:
    """The layers in each range that a PipelineModule checkpoints; 0 if it checkpoints none."""
    return module.activation_checkpoint_interval


def replace_checkpoint_function(module: Any) -> None:
    """If a PipelineModule checkpoints ranges of its layers by a function of DeepSpeed's, ds_adacc's does so now."""
    if layers_checkpointed_at_once(module) and module.activation_checkpoint_func in (CHECKPOINT, NON_REENTRANT):
        setattr(module, _ORIGINAL, module.activation_checkpoint_func)
        module.activation_checkpoint_func = checkpoint
        get_logger().info("the pipeline's activation_checkpoint_func is ds_adacc.checkpointing.checkpoint from now on")


def put_back_checkpoint_function(module: Any) -> None:
    """Undo `replace_checkpoint_function`. A function that the program or DeepSpeed has set since stays."""
    original = vars(module).pop(_ORIGINAL, None)
    if original is not None and module.activation_checkpoint_func is checkpoint:
        module.activation_checkpoint_func = original
        get_logger().info("the pipeline's activation_checkpoint_func is DeepSpeed's own again")


def layer_classes(module: Any) -> set[str]:
    """The class names of the layers of a PipelineModule, over all stages."""
    classes = (layer.typename if isinstance(layer, LayerSpec) else class_of(layer) for layer in module._layer_specs)
    return {each.__name__ for each in classes}
