"""Functions that are new at every call are told of; those of a model with many layers are not."""

import pytest
import torch
import zoo
from torch import nn

from ds_adacc.config import load
from ds_adacc.execute import registry as room
from ds_adacc.runtime.runtime import Runtime


@pytest.fixture
def runtime(monkeypatch):
    monkeypatch.setattr(room, "_MANY", 4)
    monkeypatch.setattr(room, "_FUNCTIONS", 6)
    return Runtime(load({"adacc": {"memory_budget": 1.0, "codecs": "none"}}))


def run(runtime, functions):
    x = torch.randn(2, 5, zoo.WIDTH, requires_grad=True)
    for function in functions:
        x = runtime.checkpoint(function, x)
    zoo.loss_of(x).backward()


def test_a_function_that_holds_another_number_at_each_call(runtime, caplog):
    linear = nn.Linear(zoo.WIDTH, zoo.WIDTH)
    for step in range(9):
        run(runtime, [lambda x, step=step: linear(x) * step])
        assert ("is another function at every call" in caplog.text) == (step >= 3)
    assert len([line for line in caplog.messages if "another function" in line]) == 1
    assert len(runtime.blocks.all()) == 6
    (called_once,) = runtime.blocks._called_once.values()
    assert len(called_once) == 6


def test_functions_that_are_called_again(runtime, caplog):
    layers = nn.ModuleList(nn.Linear(zoo.WIDTH, zoo.WIDTH) for _ in range(3))
    for _ in range(9):
        run(runtime, [lambda x, at=at: layers[at](x) for at in range(3)])
    assert "another function" not in caplog.text
    assert len(runtime.blocks.all()) == runtime.recordings == 3
