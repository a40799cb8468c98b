"""A model is given to another engine: that one decides how its blocks run."""

import families
import pytest
import torch
from fake_engine import Engine
from torch import nn
from translator import Translator

import ds_adacc
from ds_adacc import checkpointing
from ds_adacc.compact.linear import serve
from ds_adacc.compact.shared import Shared
from ds_adacc.config import ConfigError
from ds_adacc.engine import api as engine
from ds_adacc.engine import engine_methods, serving
from ds_adacc.engine.engine_methods import compile_blocks_first
from ds_adacc.runtime.find_blocks import find_blocks

OFF = {"adacc": {"enabled": False}}


@pytest.fixture
def initialize(monkeypatch, afresh):
    """`ds_adacc.initialize` with engines that cannot step."""
    monkeypatch.setattr(engine, "deepspeed_initialize", lambda model, **_: (Engine(model), None, None, None))
    monkeypatch.setattr(engine, "DeepSpeedEngine", Engine)
    monkeypatch.setattr(serving, "patch_engine", lambda *_: None)
    return lambda model, config: ds_adacc.initialize(model=model, config=config)[0]


def wrapped(model):
    return [name for name, module in model.named_modules() if hasattr(module.forward, "covered")]


def switched_off(initialize, model, how):
    if how == "attach":
        assert ds_adacc.attach(Engine(model), OFF) is None
    else:
        initialize(model, how)


@pytest.mark.parametrize("how", [{}, OFF, "attach"], ids=["no section", "disabled", "attached"])
def test_an_engine_without_ds_adacc_ends_what_an_earlier_one_does_to_the_model(initialize, how):
    model, other = Translator(), Translator()
    engines = initialize(model, {"adacc": {}}), initialize(other, {"adacc": {}})
    assert wrapped(model) == wrapped(other) == list(find_blocks(model, "auto"))
    switched_off(initialize, other, how)
    assert wrapped(other) == []
    assert wrapped(model) == list(find_blocks(model, "auto"))
    assert checkpointing.registry.runtime is engines[0].adacc.runtime
    switched_off(initialize, model, how)
    assert wrapped(model) == []
    assert not checkpointing.registry.has_engines
    checkpointing.checkpoint(nn.Identity(), torch.ones(2, requires_grad=True))
    assert (checkpointing.registry.runtime is None) == (how != {})


@pytest.mark.parametrize("how", [{}, OFF, "attach"], ids=["no section", "disabled", "attached"])
def test_its_optimizer_ends_no_steps_of_an_earlier_engine(initialize, monkeypatch, how):
    optimizer = torch.optim.SGD((model := Translator()).parameters(), 0.1)
    monkeypatch.setattr(Engine, "__init__", with_optimizer(Engine.__init__, optimizer))
    engine_methods.patch_optimizer(initialize(model, {"adacc": {}}))
    plain = optimizer.step.ds_adacc_original
    switched_off(initialize, model, how)
    assert optimizer.step == plain


def with_optimizer(init, optimizer):
    def new(self, model):
        init(self, model)
        self.optimizer = self.basic_optimizer = optimizer

    return new


@pytest.mark.parametrize("config", [{}, OFF])
def test_one_that_fails_ends_nothing(initialize, monkeypatch, config):
    first = initialize(model := Translator(), {"adacc": {}})
    before = wrapped(model)
    monkeypatch.setattr(engine, "deepspeed_initialize", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        initialize(model, config)
    assert wrapped(model) == before
    assert checkpointing.registry.runtime is first.adacc.runtime


def test_a_new_list_of_blocks_takes_the_place_of_the_old_one(initialize):
    initialize(model := Translator(), {"adacc": {}})
    served = initialize(model, {"adacc": {"blocks": ["Experts"]}})
    assert wrapped(model) == list(served.adacc.blocks) == [f"decoder.layers.{i}" for i in range(3)]


def test_an_engine_that_could_not_be_served_leaves_the_model_to_the_one_before(initialize, monkeypatch):
    first = initialize(model := Translator(), {"adacc": {}})
    before = [module.forward for module in model.modules()]
    monkeypatch.setattr(serving, "patch_engine", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        initialize(model, {"adacc": {"blocks": ["Experts"]}})
    assert [module.forward for module in model.modules()] == before
    assert checkpointing.registry.runtime is first.adacc.runtime


def test_gradient_checkpointing_is_the_models_own_again(initialize):
    """Of the blocks that no engine serves any more."""
    model, _ = families.example("gpt2")
    model.gradient_checkpointing_enable()
    own = {id(block): block._gradient_checkpointing_func for block in model.transformer.h}

    def theirs():
        return [block._gradient_checkpointing_func is own[id(block)] for block in model.transformer.h]

    initialize(model, {"adacc": {"blocks": ["GPT2Block"]}})
    assert not any(theirs())
    initialize(model, {"adacc": {"blocks": ["Embedding"]}})
    assert all(theirs())
    initialize(model, {"adacc": {"blocks": ["GPT2Block"]}})
    initialize(model, OFF)
    assert all(theirs())
    model.gradient_checkpointing_disable()
    model.gradient_checkpointing_enable()
    assert model.transformer.h[0]._gradient_checkpointing_func.func is torch.utils.checkpoint.checkpoint


@pytest.mark.parametrize("config", [{}, {"adacc": {"blocks": ["Linear"]}}], ids=["off", "other blocks"])
def test_layers_that_two_models_share_stay_with_the_engine_of_the_first(initialize, config):
    """As those of an actor and a critic."""
    layers = Translator()
    actor, critic = (nn.ModuleDict({"layers": layers, "head": nn.Linear(4, 4)}) for _ in range(2))
    served = initialize(actor, {"adacc": {}})  # alive to the end
    before = wrapped(actor)
    initialize(critic, config)
    assert set(wrapped(actor)) >= set(before) == {f"layers.{name}" for name in find_blocks(layers, "auto")}
    assert checkpointing.registry.has_engines and served.adacc.runtime is not None


@pytest.mark.parametrize("later", [OFF, {"adacc": {"blocks": ["Experts"]}}, {"adacc": {}}], ids=["off", "other", "on"])
def test_an_earlier_engine_compiles_no_blocks_of_the_last_one(initialize, later):
    first = initialize(model := Translator(), {"adacc": {}})
    last = initialize(model, later)
    before = {name: module.forward for name, module in model.named_modules()}
    compiled = []

    def compile(backend="aot_eager", compile_kwargs=None, compiled_autograd_enabled=False):
        compiled.append(backend)

    first.is_compiled, first.is_deepcompile_enabled = False, lambda: False
    compile_blocks_first(first, compile, compile_kwargs={})
    assert {name: module.forward for name, module in model.named_modules()} == before
    assert compiled == ["aot_eager"]
    assert wrapped(model) == ([] if later is OFF else list(last.adacc.blocks))


@pytest.mark.parametrize("config", [{}, OFF, {"adacc": {}}, {"adacc": {"compact": {}}}], ids=str)
def test_layers_that_compact_has_changed_train_under_no_other_engine(initialize, config):
    first = initialize(model := Translator(), {"adacc": {}})
    before = wrapped(model)
    name, layer = next((name, each) for name, each in model.named_modules() if type(each) is nn.Linear)
    serve(layer, 2, Shared(1))
    said = rf"adacc\.compact: an earlier engine has changed the layer '{name}' of this model.* load the state dict"
    with pytest.raises(ConfigError, match=said):
        initialize(model, {**config, "optimizer": {"type": "AdamW"}})
    if config in (OFF, {"adacc": {}}):
        other = Engine(model)
        other.basic_optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with pytest.raises(ConfigError, match=said):
            ds_adacc.attach(other, config)
    assert wrapped(model) == before and checkpointing.registry.runtime is first.adacc.runtime
    Translator().load_state_dict(model.state_dict())


def test_an_engine_that_only_evaluates_may_have_a_model_that_compact_has_changed(initialize):
    model = Translator()
    serve(next(module for module in model.modules() if type(module) is nn.Linear), 2, Shared(1))
    assert initialize(model, {"adacc": {}}).adacc.blocks
    assert ds_adacc.attach(Engine(model), OFF) is None


@pytest.mark.parametrize("later", [OFF, {"adacc": {}}], ids=["off", "on"])
def test_an_engine_without_blocks_names_the_later_one_as_the_reason(initialize, later, caplog):
    first = initialize(model := Translator(), {"adacc": {}})
    last = initialize(model, later)
    first.adacc.end_step()
    assert "no effect in this engine: a later engine of its model, or other code, has replaced" in caplog.text
    assert "adacc.blocks" not in caplog.text
    if later is not OFF:
        last.adacc.end_step()
        assert "none of the 5 blocks found" in caplog.text
