"""The Trainer's callback alone: what it does before an engine is made, and what it says if none is served."""

import types

import deepspeed
import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from ds_adacc.config import load
from ds_adacc.huggingface import AdaccCallback


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


def test_a_trainer_without_deepspeed_is_warned_of(caplog):
    AdaccCallback().on_train_begin(arguments(None), None, None)
    assert "adacc does nothing in this Trainer, as it trains without DeepSpeed" in caplog.text


def test_an_accelerator_without_deepspeed_is_warned_of(caplog, monkeypatch):
    """Accelerate leaves DeepSpeed out on a CPU, whatever the TrainingArguments say."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(reset_partial_state=True)
    callback = AdaccCallback()
    callback.on_init_end(arguments({}), None, None)
    Accelerator()
    callback.on_train_begin(arguments({}), None, None)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert "adacc does nothing in this Trainer: its TrainingArguments have a DeepSpeed config, but" in caplog.text


def test_what_the_engine_says_of_its_section_is_not_said_again(caplog):
    callback = AdaccCallback()
    callback.on_init_end(arguments({}), None, None)
    callback.on_train_begin(arguments({}), None, None)
    assert caplog.text == ""


def test_a_callback_that_is_added_later_is_warned_of(caplog):
    """The Trainer tells it of nothing before it trains, when it has its engine."""
    AdaccCallback().on_train_begin(arguments({}), None, None)
    assert "as the callback came too late" in caplog.text
