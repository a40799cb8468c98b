"""Dropout need not cost memory: without any loss, blocks with dropout fit in what full checkpointing takes."""

import peft
import pytest
import torch
import transformers as hf
import zoo
from recorded import profile_of, record
from replayed import replayed
from stack import ALLOWANCE, Model
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.runtime.runtime import Runtime

WIDTH, HEADS, TIME, BATCH = 128, 4, 64, 8


class Bert(nn.Module):
    """A layer of transformers' BERT: dropout of probabilities and twice of hidden states, of 0.1 each."""

    def __init__(self):
        super().__init__()
        config = hf.BertConfig(hidden_size=WIDTH, num_attention_heads=HEADS, intermediate_size=4 * WIDTH)
        config._attn_implementation = "eager"
        self.layer = hf.models.bert.modeling_bert.BertLayer(config)

    def forward(self, x):
        output = self.layer(x)
        return output[0] if isinstance(output, tuple) else output


class LoRA(nn.Module):
    """A frozen layer of LLaMA with adapters of rank 4 on queries and values, each with dropout of its input."""

    def __init__(self):
        super().__init__()
        adapters = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q", "v"])
        self.layer = peft.get_peft_model(zoo.LlamaBlock(WIDTH, HEADS), adapters)
        for name, parameter in self.named_parameters():
            if "lora_B" in name:  # of zeros at first
                nn.init.normal_(parameter, std=0.1)

    def forward(self, x):
        return self.layer(x)


def megatron(checkpoint):
    """Megatron's way to checkpoint a layer: a closure made anew at every forward."""

    def call(block, x):
        def custom(start, end):
            def custom_forward(*inputs):
                (y,) = inputs
                for layer in [block][start:end]:
                    y = layer(y)
                return y

            return custom_forward

        return checkpoint(custom(0, 1), x)

    return call


class Megatron(nn.Module):
    """Explicit attention with dropout of the probabilities; dropout of what both halves add to the residual."""

    def __init__(self):
        super().__init__()
        self.attention = zoo.EagerBlock(WIDTH, HEADS, 0.1, longest=256)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.drop(self.attention(x))
        return x + self.mlp(x)


MODELS = {"bert": (Bert, lambda c: c), "lora": (LoRA, lambda c: c), "megatron": (Megatron, megatron)}


@pytest.fixture(scope="module", params=MODELS)
def example(request):
    make, style = MODELS[request.param]
    model = Model(make, layers=6)
    model.leaf = torch.randn(BATCH, TIME, WIDTH, requires_grad=True)
    model.leaf.grad, model.weight = torch.zeros_like(model.leaf), torch.randn(BATCH, TIME, WIDTH)
    return model, style


def runtime_of(budget):
    section = {"codecs": "none", "memory_budget": budget, "solver": {"max_seconds": 60.0}}
    return Runtime(load({"adacc": section}))


def plain(block, x):
    return block(x)


def by_torch(function, *args):
    return checkpoint(function, *args, use_reentrant=False)


def gradients(model, call, seed):
    torch.manual_seed(seed)
    tensors = (model.leaf, *model.blocks.parameters())
    for tensor in tensors:
        tensor.grad.zero_()
    model.step(call)
    return [tensor.grad.clone() for tensor in tensors], torch.get_rng_state()


def test_nothing_but_the_input_and_the_random_states_must_be_held(example):
    model, _ = example
    block, x = model.blocks[0], torch.randn(BATCH, TIME, WIDTH, requires_grad=True)
    recording = record(block, (x,), {})
    masks = {value.index for value in recording.values if value.role == "dropout_mask" and value.producer is not None}
    policy = planner.recompute_policy(profile_of(recording))
    assert not any(policy.stores[index] for index in masks)
    states = 2 * len(recording.draws) * torch.get_rng_state().nbytes
    assert recording.draws and policy.held_bytes(profile_of(recording)) <= x.nbytes + states


@pytest.mark.matrix
def test_the_bytes_of_full_checkpointing_are_a_lossless_budget(example):
    model, style = example
    full = model.peak(style(by_torch))
    runtime = runtime_of(full)
    for seed in range(5):
        expected, found = gradients(model, plain, seed), gradients(model, style(runtime.checkpoint), seed)
        assert all(map(torch.equal, expected[0], found[0])) and torch.equal(expected[1], found[1])
    plan = runtime.controller.plan
    assert plan.peak <= full
    assert any(replayed(plan))
    assert model.peak(style(runtime.checkpoint)) <= full + ALLOWANCE
