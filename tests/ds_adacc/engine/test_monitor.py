"""The curves of DeepSpeed's monitor: those of gradient errors have a name for each block."""

import pytest
import torch
import zoo
from torch import nn

from ds_adacc.config import load
from ds_adacc.engine.adacc import Adacc
from ds_adacc.engine.monitor import events
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.runtime.wrap import wrap_blocks

LAYERS = 3
SECTION = {"memory_budget": 0.3, "codecs": "paper", "max_gradient_error": 0.5, "rectifier": {"enabled": False}}


def curves(blocks, runtime, adacc, call):
    """The names of all curves of gradient errors, once the plan is approved."""
    for _ in range(6):
        x = torch.randn(4, 64, zoo.WIDTH, requires_grad=True)
        for number in range(LAYERS):
            x = call(number, x)
        x.sum().backward()
        adacc.end_step()
    names = (name for name, _, _ in events(runtime.controller, 1))
    return [name.removeprefix("Adacc/gradient_error/") for name in names if "gradient_error" in name]


def prepared():
    torch.manual_seed(0)
    runtime = Runtime(load({"adacc": SECTION}), has_engine=True)
    return nn.ModuleList(zoo.GPTBlock(dropout=0.0) for _ in range(LAYERS)), runtime, Adacc(runtime)


@pytest.mark.usefixtures("slow_replays")
def test_blocks_of_a_model_have_their_paths():
    blocks, runtime, adacc = prepared()
    wrap_blocks({f"layers.{number}": block for number, block in enumerate(blocks)}, runtime)
    found = curves(blocks, runtime, adacc, lambda number, x: blocks[number](x))
    assert found == ["layers.0", "layers.1", "layers.2"]


@pytest.mark.usefixtures("slow_replays")
def test_functions_of_one_name_have_their_places_in_forward_order():
    blocks, runtime, adacc = prepared()

    def of(number):
        def block(x):
            return blocks[number](x)

        return block

    found = curves(blocks, runtime, adacc, lambda number, x: runtime.checkpoint(of(number), x))
    path = "test_functions_of_one_name_have_their_places_in_forward_order.<locals>.of.<locals>.block"
    assert found == [f"{path}.{number}" for number in range(LAYERS)]
