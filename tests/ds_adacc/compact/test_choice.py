"""Which layers are served, with which rank and scale, and what is said of the others."""

import pytest
import torch
import zoo
from families import example
from torch import nn

from ds_adacc.compact.choice import choose
from ds_adacc.config import CompactConfig, ConfigError
from ds_adacc.runtime.find_blocks import find_blocks

OUTPUT = "attention's output projection; name it in adacc.compact.layers to serve it"


def chosen(model, trained=None, **section):
    """(served, left alone) among the model's blocks, under a section of `compact`."""
    trained = {id(parameter) for parameter in (model.parameters() if trained is None else trained)}
    return choose(model, find_blocks(model, "auto"), CompactConfig.model_validate(section), trained)


def stack(**changes):
    return nn.ModuleDict({"blocks": nn.ModuleList(zoo.GPTBlock(**changes) for _ in range(2))})


def names(served, block="blocks.0."):
    return [one.name.removeprefix(block) for one in served if one.name.startswith(block)]


@pytest.mark.parametrize(
    ("family", "block", "expected", "output"),
    [
        ("bert", "bert.encoder.layer.0.", "query key value dense dense", "attention.output.dense"),
        ("t5", "encoder.block.0.", "q k v wi wo", "layer.0.SelfAttention.o"),
        ("vit", "vit.layers.0.", "q_proj k_proj v_proj fc1 fc2", "attention.o_proj"),
        ("llama", "model.layers.0.", "q_proj k_proj v_proj gate_proj up_proj down_proj", "self_attn.o_proj"),
        ("mixtral", "model.layers.0.", "q_proj k_proj v_proj", "self_attn.o_proj"),
    ],
)
def test_auto_serves_attention_and_mlp_but_attentions_output(family, block, expected, output):
    model, _ = example(family)
    served, left = chosen(model)
    block = next(name for name in find_blocks(model, "auto")) + "."
    assert [name.split(".")[-1] for name in names(served, block)] == expected.split()
    assert left[block + output] == OUTPUT


def test_patterns_select_layers_and_their_scales():
    served, left = chosen(stack(), layers=["*.proj", "*.0.fc?"], scale={"*.proj": 0.5, "blocks.0.*": 2})
    assert [(one.name, one.scale) for one in served] == [
        ("blocks.0.proj", 0.5),
        ("blocks.0.fc1", 2.0),
        ("blocks.0.fc2", 2.0),
        ("blocks.1.proj", 0.5),
    ]
    assert left == {}
    served, _ = chosen(stack(), scale={"*.fc1": 0.5})
    assert {one.name: one.scale for one in served}["blocks.0.qkv"] == 0.25


@pytest.mark.parametrize(
    ("rank", "ranks"), [(0.25, (8, 8, 32)), (0.999, (32, 32, 128)), (4, (4, 4, 4)), (1e-9, (1, 1, 1))]
)
def test_the_rank_is_a_number_or_a_fraction_of_the_input_features(rank, ranks):
    served, _ = chosen(stack(), rank=rank)
    assert tuple(one.rank for one in served[:3]) == ranks


def test_a_rank_above_the_input_features_is_an_error():
    with pytest.raises(ConfigError, match=r"compact\.rank = 33: must be at most 32, .* layer 'blocks\.0\.qkv'"):
        chosen(stack(), rank=33)


def test_a_pattern_that_fits_nothing_is_an_error():
    with pytest.raises(ConfigError, match=r"layers: '\*\.ffn' fits no Linear layer .* they are blocks\.0\.qkv"):
        chosen(stack(), layers=["*.fc1", "*.ffn"])


def test_tied_frozen_foreign_and_adapters_weights_are_left_alone():
    model = stack()
    first, second = model["blocks"]
    first.fc1.weight = second.fc1.weight
    first.fc2.weight.requires_grad_(False)
    second.qkv.weight = nn.Parameter(torch.zeros(32, 96).T)
    second.lora_A = nn.Linear(32, 4)
    served, left = chosen(model, trained=[p for p in model.parameters() if p is not second.fc2.weight])
    assert [one.name for one in served] == ["blocks.0.qkv"]
    assert left == {
        "blocks.0.proj": OUTPUT,
        "blocks.0.fc1": "its weight is tied to blocks.1.fc1.weight",
        "blocks.0.fc2": "its weight is frozen, so that it saves no input",
        "blocks.1.qkv": "its weight is not contiguous",
        "blocks.1.proj": OUTPUT,
        "blocks.1.fc1": "its weight is tied to blocks.0.fc1.weight",
        "blocks.1.fc2": "its weight is not among the parameters to train",
        "blocks.1.lora_A": "a LoRA adapter, small as it is",
    }


def test_convolutions_as_linear_and_mixtures_of_experts_are_left_alone():
    model, _ = example("gpt2")
    with pytest.raises(ConfigError, match=r"no layer to serve \(transformer\.h\.0\.attn\.c_attn: a Conv1D, not an nn"):
        chosen(model)

    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(8, 2)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.attention = nn.Linear(8, 8)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.moe = nn.Linear(8, 24), Mixture()

        def forward(self, x):
            return self.moe(self.qkv(x))

    served, left = chosen(nn.ModuleList(Block() for _ in range(2)))
    assert names(served, "0.") == ["qkv"]
    assert {left["0.moe.gate"], left["0.moe.experts.1"]} == {"part of a mixture of experts"}


def test_lora_layers_of_peft_are_left_alone():
    peft = pytest.importorskip("peft")
    model, _ = example("llama")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match=r"q_proj\.base_layer: its weight is frozen, so that it saves no input"):
        chosen(wrapped)
