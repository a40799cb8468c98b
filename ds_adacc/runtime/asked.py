"""Whether the program has asked for checkpointing of a block that ds_adacc has found (Rule T7)."""

from __future__ import annotations

from torch import nn

ORIGINAL = "_ds_adacc_original_checkpointing"  # the attribute of a layer that keeps what ds_adacc has replaced


def is_asked(module: nn.Module) -> bool:
    """Whether gradient checkpointing of transformers is enabled for just this layer, and ds_adacc does it.

    A layer of transformers checks the same two flags itself before each call (`GradientCheckpointingLayer`).
    """
    return ORIGINAL in vars(module) and module.training and bool(getattr(module, "gradient_checkpointing", False))
