"""Small models of diffusers, which turn noise into images or videos, with random weights, and batches for them.

The sizes in a configuration must fit together; these are about those of diffusers' own tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Draw:
    """Draws the tensors of a batch of `count` samples."""

    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        self._random = torch.Generator().manual_seed(seed)

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(self.count, *shape, generator=self._random)

    def steps(self) -> Tensor:
        return torch.randint(1000, (self.count,), generator=self._random)

    def times(self) -> Tensor:
        return torch.rand(self.count, generator=self._random)

    def ones(self, length: int) -> Tensor:
        return torch.ones(self.count, length)


Small = tuple[Mapping[str, Any], Callable[[Draw], Mapping[str, Any]]]  # a configuration, and what makes a batch

_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
_JOINT = {"num_attention_heads": 4, "attention_head_dim": 8, "joint_attention_dim": 32, "caption_projection_dim": 32}
_CHANNELS = {"in_channels": 4, "out_channels": 4}
_ADAPTIVE = {"norm_elementwise_affine": False, "activation_fn": "gelu-approximate", "attention_bias": True}

# By the model's class.
MODELS: Mapping[str, Small] = {
    "AuraFlowTransformer2DModel": (
        {**_CHANNELS, **_JOINT, "sample_size": 16, "num_mmdit_layers": 2, "num_single_dit_layers": 2}
        | {"pos_embed_max_size": 256},
        lambda draw: (
            {"hidden_states": draw.noise(4, 16, 16), "timestep": draw.times()}
            | {"encoder_hidden_states": draw.noise(9, 32)}
        ),
    ),
    "AutoencoderKL": (
        {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
        | {"block_out_channels": (16, 32), "layers_per_block": 2, "norm_num_groups": 8},
        lambda draw: {"sample": draw.noise(3, 16, 16)},
    ),
    "CogVideoXTransformer3DModel": (
        {**_CHANNELS, **_HEADS, "num_layers": 3, "time_embed_dim": 2, "text_embed_dim": 8, "dropout": 0.1}
        | {"sample_width": 8, "sample_height": 8, "sample_frames": 8, "max_text_seq_length": 8},
        lambda draw: (
            {"hidden_states": draw.noise(2, 4, 8, 8), "timestep": draw.steps()}
            | {"encoder_hidden_states": draw.noise(8, 8)}
        ),
    ),
    "DiTTransformer2DModel": (
        {**_HEADS, **_ADAPTIVE, "in_channels": 4, "sample_size": 16, "num_layers": 3},
        lambda draw: {"hidden_states": draw.noise(4, 16, 16), "timestep": draw.steps(), "class_labels": draw.steps()},
    ),
    "FluxTransformer2DModel": (
        {**_HEADS, "in_channels": 4, "num_layers": 2, "num_single_layers": 3, "axes_dims_rope": (4, 4, 8)}
        | {"joint_attention_dim": 32, "pooled_projection_dim": 32},
        lambda draw: (
            {"hidden_states": draw.noise(16, 4), "timestep": draw.times()}
            | {"encoder_hidden_states": draw.noise(12, 32), "pooled_projections": draw.noise(32)}
            | {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(12, 3)}
        ),
    ),
    "HunyuanVideoTransformer3DModel": (
        {**_CHANNELS, "num_attention_heads": 2, "attention_head_dim": 10, "num_layers": 2, "num_single_layers": 2}
        | {"num_refiner_layers": 1, "patch_size": 1, "text_embed_dim": 16, "pooled_projection_dim": 8}
        | {"rope_axes_dim": (2, 4, 4)},
        lambda draw: (
            {"hidden_states": draw.noise(4, 2, 6, 6), "timestep": draw.steps(), "guidance": draw.steps()}
            | {"encoder_hidden_states": draw.noise(12, 16), "encoder_attention_mask": draw.ones(12)}
            | {"pooled_projections": draw.noise(8)}
        ),
    ),
    "LTXVideoTransformer3DModel": (
        {**_CHANNELS, "num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 3}
        | {"cross_attention_dim": 32, "caption_channels": 32},
        lambda draw: (
            {"hidden_states": draw.noise(32, 4), "timestep": draw.steps()}
            | {"encoder_hidden_states": draw.noise(8, 32), "encoder_attention_mask": draw.ones(8)}
            | {"num_frames": 2, "height": 4, "width": 4}
        ),
    ),
    "Lumina2Transformer2DModel": (
        {"in_channels": 4, "hidden_size": 24, "num_layers": 2, "num_refiner_layers": 1, "sample_size": 16}
        | {"num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 2, "cap_feat_dim": 8}
        | {"axes_dim_rope": (4, 2, 2), "axes_lens": (128, 128, 128)},
        lambda draw: (
            {"hidden_states": draw.noise(4, 16, 16), "timestep": draw.times()}
            | {"encoder_hidden_states": draw.noise(8, 8), "encoder_attention_mask": draw.ones(8).bool()}
        ),
    ),
    "PixArtTransformer2DModel": (
        {**_ADAPTIVE, "num_attention_heads": 3, "attention_head_dim": 8, "num_layers": 3, "sample_size": 8}
        | {"cross_attention_dim": 24, "caption_channels": None, "use_additional_conditions": False},
        lambda draw: (
            {"hidden_states": draw.noise(4, 8, 8), "timestep": draw.steps()}
            | {"encoder_hidden_states": draw.noise(8, 24)}
            | {"added_cond_kwargs": {"aspect_ratio": None, "resolution": None}}
        ),
    ),
    "QwenImageTransformer2DModel": (
        {"in_channels": 16, "out_channels": 4, "num_attention_heads": 3, "attention_head_dim": 16, "num_layers": 3}
        | {"joint_attention_dim": 16, "axes_dims_rope": (8, 4, 4)},
        lambda draw: (
            {"hidden_states": draw.noise(16, 16), "timestep": draw.times()}
            | {"encoder_hidden_states": draw.noise(7, 16), "encoder_hidden_states_mask": draw.ones(7)}
            | {"img_shapes": [[(1, 4, 4)]] * draw.count}
        ),
    ),
    "SD3Transformer2DModel": (
        {**_CHANNELS, **_JOINT, "num_layers": 3, "sample_size": 16, "pooled_projection_dim": 64},
        lambda draw: (
            {"hidden_states": draw.noise(4, 16, 16), "timestep": draw.steps()}
            | {"encoder_hidden_states": draw.noise(10, 32), "pooled_projections": draw.noise(64)}
        ),
    ),
    "SanaTransformer2DModel": (
        {**_CHANNELS, "num_attention_heads": 2, "attention_head_dim": 4, "num_layers": 3, "sample_size": 8}
        | {"num_cross_attention_heads": 2, "cross_attention_head_dim": 4, "cross_attention_dim": 8}
        | {"caption_channels": 8, "dropout": 0.1},
        lambda draw: (
            {"hidden_states": draw.noise(4, 8, 8), "timestep": draw.steps()}
            | {"encoder_hidden_states": draw.noise(8, 8)}
        ),
    ),
    "UNet2DConditionModel": (
        {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "block_out_channels": (32, 64)}
        | {"up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "cross_attention_dim": 32, "norm_num_groups": 8}
        | {"sample_size": 16, "dropout": 0.1},
        lambda draw: (
            {"sample": draw.noise(4, 16, 16), "timestep": draw.steps()} | {"encoder_hidden_states": draw.noise(7, 32)}
        ),
    ),
    "WanTransformer3DModel": (
        {**_CHANNELS, "num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 3}
        | {"text_dim": 16, "ffn_dim": 32, "rope_max_seq_len": 32},
        lambda draw: (
            {"hidden_states": draw.noise(4, 2, 8, 8), "timestep": draw.steps()}
            | {"encoder_hidden_states": draw.noise(12, 16)}
        ),
    ),
}


def model_of(name: str) -> nn.Module:
    """A small model of this class, in training mode. Raises ImportError without diffusers."""
    import diffusers

    return getattr(diffusers, name)(**MODELS[name][0]).train()


def batch_of(name: str, count: int, seed: int) -> Mapping[str, Any]:
    """The arguments of one forward for so many samples."""
    return MODELS[name][1](Draw(count, seed))
