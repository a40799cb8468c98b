"""Small models of every type of transformers and of some of diffusers, with random weights and dropout, and batches.

A configuration of transformers has hundreds of names for a few things: how wide a model is, how deep, how many heads
and experts it has. Those that are known here get small numbers; all else stays as the type's own default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import small_diffusers
import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

WIDTH, LAYERS, HEADS, VOCABULARY = 64, 4, 4, 128

# By kind: what transformers builds a model of that kind with, and the classes by model type.
_KINDS = {
    "causal": (transformers.AutoModelForCausalLM, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "masked": (transformers.AutoModelForMaskedLM, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "seq2seq": (transformers.AutoModelForSeq2SeqLM, modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    "image": (transformers.AutoModelForImageClassification, modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
    "speech": (transformers.AutoModelForCTC, modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES),
}
KINDS = (*_KINDS, "diffusion")

_SMALL = (
    (WIDTH, "hidden_size d_model n_embd dim emb_dim embedding_size embed_dim model_dim decoder_hidden_size"),
    (
        2 * WIDTH,
        "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim moe_intermediate_size "
        "shared_expert_intermediate_size ffn_hidden_size d_inner expert_ffn_hidden_size feed_forward_size "
        "moe_shared_expert_intermediate_size intermediate_size_mlp block_ff_dim shared_intermediate_size",
    ),
    (
        LAYERS,
        "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers num_decoder_layers "
        "num_encoder_layers",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
        "mamba_num_heads mamba_n_heads linear_num_value_heads num_local_experts num_experts n_routed_experts "
        "moe_num_experts",
    ),
    (
        2,
        "num_key_value_heads num_kv_heads n_kv_heads linear_num_key_heads num_experts_per_tok num_experts_per_token "
        "moe_topk moe_k n_shared_experts num_global_key_value_heads",
    ),
    (1, "n_group topk_group first_k_dense_replace mamba_n_groups n_groups num_nextn_predict_layers kv_n_heads"),
    (
        16,
        "head_dim linear_key_head_dim linear_value_head_dim v_head_dim d_kv kv_lora_rank sliding_window state_size "
        "mamba_d_state ssm_state_size global_head_dim index_head_dim qk_nope_head_dim qk_rope_head_dim "
        "attention_window",
    ),
    (8, "rotary_dim chunk_size mamba_chunk_size index_topk"),
    (32, "q_lora_rank mamba_head_dim mamba_d_head attention_chunk_size kv_channels"),
    (VOCABULARY, "vocab_size n_positions max_position_embeddings max_seq_len n_ctx vocab_size_per_layer_input"),
)
SMALL = {name: number for number, names in _SMALL for name in names.split()}

# By model type, what else it needs: layers of both kinds where there are few, and sizes that must fit together.
_OWN: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "diffllama": {"attention_dropout": 0.0},
    "donut-swin": {"embed_dim": 96, "window_size": 2, "patch_size": 4},
    "esmc": {"num_key_value_heads": HEADS},
    "falcon_h1": {"mamba_d_ssm": 2 * WIDTH},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": HEADS, "head_dim": 32},
    "swin": {"embed_dim": 96, "window_size": 2, "patch_size": 4},
    "swinv2": {"embed_dim": 96, "window_size": 2, "patch_size": 4},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "attention_head_dim": 32,
        "mamba_headdim": 16,
    },
    "zaya": {"num_experts_per_tok": 1},
}
_IMAGE = {"image_size": 64, "patch_size": 8}
_DROPOUTS = "dropout", "pdrop", "dropout_rate", "dropout_prob", "dropout_p"
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def types_of(kind: str) -> list[str]:
    """All model types of this kind, sorted."""
    return sorted(small_diffusers.MODELS if kind == "diffusion" else _KINDS[kind][1])


def model_of(kind: str, name: str) -> nn.Module:
    """A small model of this type, in training mode. Raises what transformers raises if these sizes do not suit it."""
    if kind == "diffusion":
        return small_diffusers.model_of(name)
    config = _small(transformers.AutoConfig.for_model(name))
    config.architectures = []
    if kind == "seq2seq":
        config.decoder_start_token_id = _TOKENS["decoder_start_token_id"]
    return _KINDS[kind][0].from_config(config).train()


def batch_of(kind: str, name: str, length: int, seed: int) -> Mapping[str, Any]:
    """Random tokens, two texts of this length, to be predicted; or speech that long, or an eighth as many images."""
    if kind == "diffusion":
        return small_diffusers.batch_of(name, length // 8, seed)
    random = torch.Generator().manual_seed(seed)
    if kind == "image":
        count, size = length // 8, _IMAGE["image_size"]
        images = torch.randn(count, 3, size, size, generator=random)
        return {"pixel_values": images, "labels": torch.randint(2, (count,), generator=random)}
    if kind == "speech":
        sounds = torch.randn(2, 320 * length, generator=random)
        return {"input_values": sounds, "labels": torch.randint(4, VOCABULARY, (2, length // 4), generator=random)}
    tokens = torch.randint(4, VOCABULARY, (2, length), generator=random)
    labels = torch.randint(4, VOCABULARY, (2, length), generator=random) if kind == "seq2seq" else tokens
    return {"input_ids": tokens, "labels": labels}


def loss_of(output: Any) -> Tensor:
    """The model's own loss; of one of diffusers, the mean square of what it predicts."""
    return output.loss if "loss" in output else output.sample.square().mean()


def _small(config: Any) -> Any:
    """The configuration made anew with small numbers, so that it derives from them whatever it derives."""
    changed: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        own = vars(config).get(name)
        if isinstance(own, transformers.PreTrainedConfig):
            changed[name] = _small(own).to_dict()
        elif name in SMALL and isinstance(value, int | None):
            changed[name] = SMALL[name]
        elif name in _IMAGE and isinstance(value, int):
            changed[name] = _IMAGE[name]
        elif name.endswith(_DROPOUTS) and isinstance(value, float):
            changed[name] = 0.1
        elif name.endswith("_token_id") and isinstance(value, int):
            changed[name] = _TOKENS.get(name, 3)
    if "kv_lora_rank" in changed:  # each head has keys and values of its own, made from one small vector
        changed["num_key_value_heads"] = HEADS
    return type(config)(**{**changed, **_OWN.get(config.model_type, {})})
