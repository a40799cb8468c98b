"""`deepspeed.checkpointing` in scripts that must not change: ds_adacc's while an engine runs with it."""

import copy
import json

import deepspeed
import pytest
import torch
import torch.utils.checkpoint
import zoo
from torch import nn

import ds_adacc.engine.patch_checkpointing as patching
from ds_adacc import checkpointing
from ds_adacc.config import load
from ds_adacc.engine.patch_checkpointing import CHECKPOINT, patch_checkpointing
from ds_adacc.engine.pipeline import put_back_checkpoint_function, replace_checkpoint_function
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.runtime.wrap import wrap_blocks

NAMES = ("checkpoint", "non_reentrant_checkpoint")


@pytest.fixture(autouse=True)
def configured(monkeypatch, afresh):
    """What DeepSpeed's `configure` was given. Its functions want a process group: torch's own stands for them."""
    given = []

    def own(function, *args):
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)

    for name in (*NAMES, "configure", "partition_activations_in_checkpoint"):
        monkeypatch.setattr(deepspeed.checkpointing, name, getattr(deepspeed.checkpointing, name))
    for name in ("CHECKPOINT", "NON_REENTRANT"):
        monkeypatch.setattr(patching, name, own)
    for name in ("_CONFIGURE", "_PARTITION"):
        monkeypatch.setattr(patching, name, lambda *args, **kwargs: given.append((args, kwargs)))
    patch_checkpointing()
    return given


def served(model):
    """The runtime of an engine that trains the model."""
    runtime = Runtime(load({"adacc": {"memory_budget": 1.0, "codecs": "none"}}), has_engine=True)
    checkpointing.registry.register(runtime, model)
    return runtime


def given_to(name, block):
    """The gradients of the block, called by DeepSpeed's function of this name, and how often its forward runs."""
    forwards = []
    handle = block.fc1.register_forward_hook(lambda *_: forwards.append(1))
    torch.manual_seed(1)
    x = torch.randn(2, 8, zoo.WIDTH, requires_grad=True)
    y = getattr(deepspeed.checkpointing, name)(lambda given: block(given), x)
    found = torch.autograd.grad(y.square().mean(), [x, *block.parameters()])
    handle.remove()
    return found, len(forwards)


@pytest.fixture
def block():
    torch.manual_seed(0)
    return zoo.GPTBlock()


@pytest.mark.parametrize("name", NAMES)
def test_without_an_engine_of_ds_adacc_deepspeeds_own_function_runs(block, name):
    _, forwards = given_to(name, block)
    assert forwards == 2


@pytest.mark.parametrize("name", NAMES)
def test_with_one_its_plan_decides_and_the_gradients_are_the_same(block, name):
    plain, _ = given_to(name, block)
    runtime = served(block)
    found, forwards = given_to(name, block)
    zoo.assert_same(found, plain)
    assert (forwards, runtime.recordings) == (1, 1)


@pytest.mark.parametrize("engines", [1, 2])
def test_what_belongs_to_an_engine_without_ds_adacc_stays_with_deepspeed(block, engines):
    """As a critic whose config has no "adacc" section, beside an actor whose config has one."""
    trained = [zoo.GPTBlock() for _ in range(engines)]
    runtimes = [served(each) for each in trained]
    for name in NAMES:
        _, forwards = given_to(name, block)
        assert forwards == 2
    assert [runtime.calls for runtime in runtimes] == [0] * engines
    assert given_to("checkpoint", trained[0])[1] == runtimes[0].calls == 1


def test_a_copy_of_a_block_of_an_engine_runs_through_its_runtime(block):
    runtime = served(block)
    wrap_blocks({"block": block}, runtime)
    _, forwards = given_to("checkpoint", copy.deepcopy(block))
    assert (forwards, runtime.calls) == (1, 1)


def test_both_are_configured(configured):
    deepspeed.checkpointing.configure(None, None, False, checkpoint_in_cpu=True)
    assert configured == [((None, None, False), {"checkpoint_in_cpu": True})]
    assert checkpointing.registry.options.cpu_checkpointing
    assert not checkpointing.is_configured(), "no section has come yet"
    deepspeed.checkpointing.partition_activations_in_checkpoint(True)
    assert configured[1:] == [((True,), {})]
    assert checkpointing.registry.options.partition_activations


def test_an_engine_is_told_of_a_configuration_that_comes_later(block, tmp_path):
    runtime, config = served(block), {"activation_checkpointing": {"cpu_checkpointing": True}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for given, expected in ((config, True), (None, False), (str(tmp_path / "config.json"), True)):
        deepspeed.checkpointing.configure(None, deepspeed_config=given)
        assert runtime.agreement.inputs.on_host is expected
    deepspeed.checkpointing.configure(None, config, checkpoint_in_cpu=False)
    assert not runtime.agreement.inputs.on_host, "an argument replaces a key"


def test_it_may_be_done_twice(block):
    patch_checkpointing()
    _, forwards = given_to("checkpoint", block)
    assert forwards == 2
    assert deepspeed.checkpointing.checkpoint.__wrapped__ is patching.CHECKPOINT, "and not what was put in its place"


def test_the_function_that_a_pipeline_has_by_default_is_replaced_all_the_same():
    module = nn.Module()
    module.activation_checkpoint_interval, module.activation_checkpoint_func = 1, CHECKPOINT
    replace_checkpoint_function(module)
    assert module.activation_checkpoint_func is checkpointing.checkpoint
    put_back_checkpoint_function(module)
    assert module.activation_checkpoint_func is CHECKPOINT
