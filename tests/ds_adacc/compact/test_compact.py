"""The served layers of an engine: their seeds, their epochs, and layers that do not train."""

from types import SimpleNamespace

import pytest
import torch
import zoo
from torch import nn

from ds_adacc.compact.compact import convert
from ds_adacc.compact.optimized import groups_of
from ds_adacc.config import CompactConfig, ConfigError


class Reading(nn.Module):
    """A block that reads one of its weights without calling the layer."""

    def __init__(self):
        super().__init__()
        self.called, self.read = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.called(x) @ self.read.weight


def engine_of(block, **section):
    """A model of one block, with what is asked of its engine, and its CompAct."""
    model = nn.ModuleDict({"block": block})
    groups = groups_of(model, None, None)
    compact = convert(model, {"block": block}, CompactConfig.model_validate(section), groups)
    optimizer = torch.optim.SGD(groups, lr=0.1)
    return SimpleNamespace(optimizer=optimizer, basic_optimizer=optimizer, global_steps=0, skipped_steps=0), compact


def step(engine, compact, block, skipped=False):
    block(torch.ones(2, 8)).sum().backward()
    of_step = compact.rates_of(engine.optimizer)
    engine.global_steps += 1
    if skipped:
        engine.skipped_steps += 1
    else:
        engine.optimizer.step()
        compact.end_step(engine, of_step)
    engine.optimizer.zero_grad()


def drawn(compact):
    return {name: layer.columns.tolist() for name, layer in compact.layers.items()}


def test_projections_change_after_each_interval_of_applied_steps():
    block = Reading()
    engine, compact = engine_of(block, rank=4, update_interval=2)
    compact.begin(engine, seed=1)
    seen = [drawn(compact)]
    for skipped in (False, True, False, False, False):
        step(engine, compact, block, skipped)
        seen.append(drawn(compact))
    assert [seen[i] == seen[i + 1] for i in range(5)] == [True, True, False, True, False]
    engine, again = engine_of(Reading(), rank=4, update_interval=2)
    again.continue_from(1, 4)
    assert drawn(again) == seen[-1]


def test_without_an_interval_projections_stay():
    block = Reading()
    engine, compact = engine_of(block, rank=4, update_interval=None)
    compact.begin(engine, seed=1)
    before = drawn(compact)
    compact.draw(10**6)
    assert drawn(compact) == before


def test_layers_that_read_one_tensor_have_the_same_projection_wherever_that_is_possible():
    block = nn.ModuleDict({"q": nn.Linear(8, 8), "k": nn.Linear(8, 4), "v": nn.Linear(16, 4), "o": nn.Linear(8, 8)})
    _, compact = engine_of(block, rank=4, layers=["*"])
    compact.draw(0)
    q, k, v, o = (block[name] for name in "qkvo")
    assert q.rows is k.rows and q.columns is k.columns
    assert len(v.rows) == 16 and v.columns.tolist() != o.columns.tolist() != q.columns.tolist()


def test_a_layer_that_is_not_called_is_named_once(caplog):
    block = Reading()
    engine, compact = engine_of(block, rank=4)
    compact.begin(engine, seed=1)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0  # a warm-up from zero changes no layer, and tells nothing
    step(engine, compact, block)
    assert "unchanged" not in caplog.text
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.1
    before = {name: layer.weight.detach().clone() for name, layer in compact.layers.items()}
    step(engine, compact, block)
    step(engine, compact, block)
    assert caplog.text.count("the first step left the weight of block.read unchanged (such layers: 1)") == 1
    changed = [name for name, layer in compact.layers.items() if not torch.equal(layer.weight, before[name])]
    assert changed == ["block.called"]


def test_a_layer_without_a_gradient_does_not_decay():
    """AdamW leaves a parameter alone that has none: one that is frozen in the middle of training, or not called."""
    block = Reading()
    engine, compact = engine_of(block, rank=4)
    groups = [{**group, "weight_decay": 0.5} for group in engine.optimizer.param_groups]
    engine.optimizer = torch.optim.AdamW(groups)
    read, called = block.read.weight.detach().clone(), block.called.weight.detach().clone()
    step(engine, compact, block)
    assert torch.equal(block.read.weight, read)
    assert not torch.equal(block.called.weight, called)
    compact.layers["block.called"].compact_update.requires_grad_(False)
    called = block.called.weight.detach().clone()
    step(engine, compact, block)
    assert torch.equal(block.called.weight, called)


def test_an_optimizer_that_drops_the_groups_is_refused():
    engine, compact = engine_of(zoo.GPTBlock())
    engine.optimizer = torch.optim.SGD([layer.compact_update for layer in compact.layers.values()], lr=0.1)
    with pytest.raises(ConfigError, match=r"SGD does not train the proxy of layer 'block\.fc1'"):
        compact.begin(engine, seed=0)


def test_an_optimizer_that_reads_values_is_refused_before_it_steps():
    engine, compact = engine_of(Reading(), rank=4)
    engine.basic_optimizer = torch.optim.Adafactor(engine.optimizer.param_groups)
    with pytest.raises(ConfigError, match="Adafactor reads the values of the weights, and CompAct gives it proxies"):
        compact.begin(engine, seed=0)
