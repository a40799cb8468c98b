"""Functions that are new at every call are told of; those of a model with many layers are not."""

import pytest
import torch
import zoo
from torch import nn

from ds_adacc.config import load
from ds_adacc.execute import block_registry as room
from ds_adacc.runtime.runtime import Runtime


@pytest.fixture
def runtime(monkeypatch):
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
        assert ("is another function at every call" in caplog.text) == (step >= 6)
    assert len([line for line in caplog.messages if "another function" in line]) == 1
    assert len(runtime.blocks.all()) == len(runtime.blocks._called_once) == 6


def test_functions_that_are_called_again(runtime, caplog):
    """First three, and then six others, before which the three are forgotten."""
    layers = nn.ModuleList(nn.Linear(zoo.WIDTH, zoo.WIDTH) for _ in range(9))
    for group in ((0, 1, 2), (3, 4, 5, 6, 7, 8)):
        for _ in range(2):
            run(runtime, [lambda x, at=at: layers[at](x) for at in group])
    assert "another function" not in caplog.text
    assert len(runtime.blocks.all()) == 6 and runtime.recordings == 9
    assert not runtime.blocks._called_once
