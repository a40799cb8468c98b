"""The models of the ZeRO tests: each takes tokens and returns its loss."""

from __future__ import annotations

import torch
import zoo
from torch import nn

TOKENS, CONTEXT = 64, 16


class Model(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, zoo.WIDTH)
        self.blocks = nn.ModuleList(zoo.GPTBlock() for _ in range(layers))
        self.head = nn.Linear(zoo.WIDTH, TOKENS)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


class Llama(nn.Module):
    """The embedding is the head's weight too."""

    def __init__(self, lora=False):
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": zoo.WIDTH, "intermediate_size": 3 * zoo.WIDTH, "vocab_size": TOKENS}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = LlamaConfig(num_hidden_layers=3, tie_word_embeddings=True, use_cache=False, **sizes, **heads)
        self.inner = LlamaForCausalLM(config)
        if lora:
            from peft import LoraConfig, get_peft_model

            adapter = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"])
            self.inner = get_peft_model(self.inner, adapter)

    def forward(self, tokens):
        return self.inner(input_ids=tokens, labels=tokens).loss


def make(name):
    if name in ("llama", "lora"):
        return Llama(lora=name == "lora")
    model = Model()
    if name == "tied blocks":
        model.blocks[2].fc1.weight = model.blocks[0].fc1.weight
    if name == "frozen":
        for block in model.blocks[::2]:
            block.requires_grad_(False)
    return model


def blocks_of(model):
    """The modules that ds_adacc is to wrap."""
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 3)


def batch(random):
    return torch.randint(TOKENS, (2, CONTEXT), generator=random)
