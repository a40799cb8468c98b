"""Models of transformers: found, recorded, really recomputed, and not a bit of the gradients off."""

import copy
import weakref

import families
import pytest
import torch
import transformers
import zoo
from experts import WIDTH, Experts
from storages import Storages
from torch import nn

from ds_adacc.config import load
from ds_adacc.engine.adacc import Adacc
from ds_adacc.engine.gradient_checkpointing import replace_gradient_checkpointing, take_over_gradient_checkpointing
from ds_adacc.runtime.find_blocks import find_blocks
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.runtime.wrap import wrap_blocks

LOSSLESS = {"memory_budget": 0.88, "codecs": "none", "rectifier": {"enabled": False}, "solver": {"max_seconds": 30.0}}


def instruction(model, inputs, seed):
    """(loss, gradients by name) of one step, on a batch of its own."""
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(**families.another(inputs, seed)).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def held(model, inputs):
    """Bytes alive between forward and backward."""
    model.zero_grad()
    with Storages() as storages:
        loss = model(**inputs).loss
    alive = storages.alive()
    loss.backward()
    return alive


def served(model):
    runtime = Runtime(load({"adacc": LOSSLESS}), has_engine=True)
    blocks = find_blocks(model, "auto")
    wrap_blocks(blocks, runtime)
    return Adacc(runtime, blocks), blocks


@pytest.fixture
def no_warnings(caplog):
    yield
    assert [r.getMessage() for r in caplog.records if r.name == "ds_adacc" and r.levelname == "WARNING"] == []


FURTHER = ("llama", "mistral", "bert eager", "mixtral eager")  # others have what these have


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.further] * (name in FURTHER)) for name in families.FAMILIES]
)
def test_recomputed_or_planned_the_gradients_are_bit_identical(name, no_warnings):
    model, inputs = families.example(name)
    plain, plain_bytes = [instruction(model, inputs, seed) for seed in range(3)], held(model, inputs)
    adacc, blocks = served(model)
    for seed in range(3):  # what is proven is recomputed, for want of a plan
        zoo.assert_same_bits(plain[seed], instruction(model, inputs, seed))
    recomputed_bytes = held(model, inputs)
    adacc.end_step()
    for seed in range(3):
        zoo.assert_same_bits(plain[seed], instruction(model, inputs, seed))
        adacc.end_step()
    planned_bytes = held(model, inputs)
    assert recomputed_bytes < planned_bytes < plain_bytes
    assert adacc.runtime.recordings == len(blocks) == len(adacc.runtime.blocks.variants())


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_gradient_checkpointing_is_taken_over(name, no_warnings, monkeypatch):
    model, inputs = families.example(name)
    plain = [instruction(model, inputs, seed) for seed in range(2)]
    monkeypatch.setattr(transformers.modeling_utils, "checkpoint", lambda *_, **__: pytest.fail("recomputed twice"))
    model.gradient_checkpointing_enable()
    adacc, blocks = served(model)
    assert replace_gradient_checkpointing(model, blocks)
    assert not replace_gradient_checkpointing(model, blocks)
    for seed in range(2):
        zoo.assert_same_bits(plain[seed], instruction(model, inputs, seed))
    assert model(**inputs).past_key_values is None  # as transformers has it
    assert adacc.runtime.recordings == len(blocks)


def test_gradient_checkpointing_enabled_later_is_taken_over_too(no_warnings, monkeypatch, caplog):
    """DeepSpeed-Chat enables it before each training step, and disables it before it generates. It is told of once."""
    model, inputs = families.example("gpt2")
    plain = [instruction(model, inputs, seed) for seed in range(2)]
    monkeypatch.setattr(transformers.modeling_utils, "checkpoint", lambda *_, **__: pytest.fail("recomputed twice"))
    adacc, blocks = served(model)
    take_over_gradient_checkpointing(model, blocks)
    for seed, enable in enumerate(("gradient_checkpointing_enable", "activation_checkpointing_enable")):
        if hasattr(model, enable):  # the latter in newer versions
            getattr(model, enable)()
            zoo.assert_same_bits(plain[seed], instruction(model, inputs, seed))
            model.gradient_checkpointing_disable()
    model.gradient_checkpointing_enable()
    assert len([line for line in caplog.messages if "gradient checkpointing is turned off" in line]) == 1
    assert adacc.runtime.recordings == len(blocks)
    twin = copy.deepcopy(model)
    assert twin.gradient_checkpointing_enable.__self__ is twin


def test_gradient_checkpointing_asks_for_a_second_forward_of_layers_that_read_data(no_warnings):
    """Those of Mixtral whose experts run one by one. Without it, what follows the router is retained."""
    model, inputs = families.example("mixtral eager")
    plain = [instruction(model, inputs, seed) for seed in range(3)]
    adacc, blocks = served(model)
    take_over_gradient_checkpointing(model, blocks)
    zoo.assert_same_bits(plain[0], instruction(model, inputs, 0))
    by_operators = held(model, inputs)
    model.gradient_checkpointing_enable()
    for seed in range(3):
        zoo.assert_same_bits(plain[seed], instruction(model, inputs, seed))
    assert 3 * held(model, inputs) < by_operators
    model.eval()
    assert held(model, inputs) >= by_operators
    variants = adacc.runtime.blocks.variants()
    assert sum(variant.recording.is_whole for _, variant in variants) == len(blocks)


class AsInDiffusers(nn.Module):
    """The model, not the layer, has the function; and the method that enables it has another name."""

    def __init__(self, kind=zoo.GPTBlock):
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(2))
        self.gradient_checkpointing, self._gradient_checkpointing_func = False, None

    def enable_gradient_checkpointing(self):
        self.gradient_checkpointing = True
        self._gradient_checkpointing_func = lambda *_: pytest.fail("recomputed twice")

    def forward(self, x):
        for layer in self.layers:
            x = self._gradient_checkpointing_func(layer, x) if self.gradient_checkpointing else layer(x)
        return x


def test_gradient_checkpointing_of_diffusers_is_taken_over_whenever_it_is_enabled(caplog):
    model = AsInDiffusers()
    take_over_gradient_checkpointing(model, ["layers.0", "layers.1"])
    for _ in range(2):
        model.enable_gradient_checkpointing()
        model(torch.randn(2, 3, zoo.WIDTH))
    assert len([line for line in caplog.messages if "gradient checkpointing is turned off" in line]) == 1


def test_a_function_of_the_models_asks_for_the_layers_that_it_is_given(no_warnings):
    """Code from the Hub calls its layers so, mixtures of experts among them."""
    torch.manual_seed(0)
    model, x = AsInDiffusers(Experts), (torch.randn(48, WIDTH, requires_grad=True),)
    plain = [zoo.gradients(model, x, {}, seed=seed) for seed in range(3)]
    adacc, blocks = served(model)
    take_over_gradient_checkpointing(model, blocks)
    model.enable_gradient_checkpointing()
    for seed in range(3):
        zoo.assert_same_bits(plain[seed], zoo.gradients(model, x, {}, seed=seed))
    assert [variant.recording.is_whole for _, variant in adacc.runtime.blocks.variants()] == [True, True]


def test_modules_apart_from_the_blocks_keep_their_checkpointing():
    model, _ = families.example("t5")
    model.gradient_checkpointing_enable()
    own = model.encoder.block[0]._gradient_checkpointing_func
    replace_gradient_checkpointing(model, ["decoder.block.0.layer.2"])
    assert model.encoder.block[0]._gradient_checkpointing_func is own
    assert model.decoder.block[1]._gradient_checkpointing_func is own
    assert model.decoder.block[0]._gradient_checkpointing_func is not own


def test_a_cache_dies_with_the_output_that_has_it(uncollected):
    model, inputs = families.example("t5")
    served(model)
    for _ in range(2):
        output = model(**inputs)
        cache, loss = weakref.ref(output.past_key_values), output.loss
        del output
        assert cache() is None
        loss.backward()
