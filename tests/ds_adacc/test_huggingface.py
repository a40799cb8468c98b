"""The Trainer's callback alone: what it does before an engine is made, and what it says if none is served."""

import types

import deepspeed
import families
import pytest

from ds_adacc.config import load
from ds_adacc.huggingface import AdaccCallback
from ds_adacc.runtime.find_blocks import find_blocks
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.runtime.wrap import wrap_blocks


@pytest.fixture(autouse=True)
def deepspeed_put_back(monkeypatch):
    monkeypatch.setattr(deepspeed, "initialize", deepspeed.initialize)


def arguments(config):
    """What the callback reads of TrainingArguments."""
    plugin = types.SimpleNamespace(hf_ds_config=types.SimpleNamespace(config=config))
    return types.SimpleNamespace(deepspeed_plugin=plugin if config is not None else None)


def test_auto_is_left_to_its_default_as_the_trainer_cannot_fill_it_in():
    config = {"train_batch_size": "auto", "adacc": {"memory_budget": "auto", "blocks": "auto", "codecs": "none"}}
    expected = load(config)
    AdaccCallback().on_init_end(arguments(config), None, None)
    assert config == {"train_batch_size": "auto", "adacc": {"codecs": "none"}}
    assert load(config) == expected
    assert deepspeed.initialize.__module__ == "ds_adacc.engine.api"


@pytest.mark.parametrize("config", [None, {}, {"adacc": "auto"}])
def test_other_configs_are_left_alone(config):
    AdaccCallback().on_init_end(arguments(config), None, None)
    assert config in (None, {}, {"adacc": "auto"})


def test_a_trainer_that_serves_no_block_is_warned_of(caplog):
    model, _ = families.example("gpt2")
    with caplog.at_level("WARNING", logger="ds_adacc"):
        AdaccCallback().on_train_begin(None, None, None, model=model)
        assert "adacc does nothing in this Trainer" in caplog.text
        caplog.clear()
        wrap_blocks(find_blocks(model, "auto"), Runtime(load({"adacc": {}}), stepped=True))
        AdaccCallback().on_train_begin(None, None, None, model=model)
        assert caplog.text == ""
