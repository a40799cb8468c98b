"""Small random models of Hugging Face's transformers, each with the arguments of one forward that give a loss."""

from __future__ import annotations

import torch
import transformers as hf

_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_TEXT = _SIZES | {
    "vocab_size": 99,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = _TEXT | {"num_key_value_heads": 1}
_WIDE = _GROUPED | {"head_dim": 16}
_DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


def _gpt2():
    config = hf.GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=99, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    return hf.GPT2LMHeadModel(config), _tokens()


def _t5():
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 99}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, decoder_start_token_id=0)), _tokens(padded=True)


def _vit():
    config = hf.ViTConfig(**_SIZES, **_DROPOUT, image_size=16, patch_size=4)
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return hf.ViTForImageClassification(config), {"pixel_values": pixels, "labels": torch.tensor([0, 1])}


def _text(model, config, padded=False, **sizes):
    return lambda: (model(config(**sizes)), _tokens(padded))


FAMILIES = {
    "gpt2": _gpt2,
    "llama": _text(hf.LlamaForCausalLM, hf.LlamaConfig, **_WIDE, attention_dropout=0.1),
    "llama eager": _text(hf.LlamaForCausalLM, hf.LlamaConfig, True, **_WIDE, attn_implementation="eager"),
    "qwen2": _text(hf.Qwen2ForCausalLM, hf.Qwen2Config, True, **_GROUPED, attention_dropout=0.1),
    "qwen3": _text(hf.Qwen3ForCausalLM, hf.Qwen3Config, **_WIDE),
    "mistral": _text(hf.MistralForCausalLM, hf.MistralConfig, **_WIDE, sliding_window=8),
    "gemma2": _text(hf.Gemma2ForCausalLM, hf.Gemma2Config, True, **_WIDE, sliding_window=8),
    "bert": _text(hf.BertForMaskedLM, hf.BertConfig, True, **_TEXT, **_DROPOUT),
    "bert eager": _text(hf.BertForMaskedLM, hf.BertConfig, **_TEXT, **_DROPOUT, attn_implementation="eager"),
    "t5": _t5,
    "mixtral": _text(hf.MixtralForCausalLM, hf.MixtralConfig, **_WIDE, num_local_experts=4, output_router_logits=True),
    "mixtral eager": _text(
        hf.MixtralForCausalLM, hf.MixtralConfig, **_WIDE, num_local_experts=4, experts_implementation="eager"
    ),
    "vit": _vit,
}


def example(name):
    """(model in training, keyword arguments of a forward) by name, seeded."""
    torch.manual_seed(0)
    model, inputs = FAMILIES[name]()
    return model.train(), inputs


def another(inputs, seed):
    """The same arguments with another batch of tokens, so that experts are chosen anew; pixels stay."""
    if "input_ids" not in inputs:
        return inputs
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    tokens = (inputs["input_ids"] * (seed + 1) % 96 + 3)[:, order]
    return inputs | {"input_ids": tokens, "labels": tokens}


def _tokens(padded=False):
    tokens = torch.randint(3, 99, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, 9:] = 0
    return {"input_ids": tokens, "labels": tokens} | ({"attention_mask": mask} if padded else {})
