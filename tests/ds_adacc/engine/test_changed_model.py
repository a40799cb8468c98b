"""Layers that are put into the model after its engine is made run without ds_adacc: the log says so."""

import copy

import torch
import zoo
from torch import nn

from ds_adacc.config import load
from ds_adacc.engine.adacc import Adacc
from ds_adacc.runtime.find_blocks import find_blocks
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.runtime.wrap import wrap_blocks


def served(model):
    """The results of an engine of this model, whose first module is a list of blocks."""
    blocks = {f"0.{number}": block for number, block in enumerate(model[0])}
    runtime = Runtime(load({"adacc": {}}), has_engine=True)
    wrap_blocks(blocks, runtime)
    return Adacc(runtime, blocks, model=model)


def test_a_block_that_is_replaced_is_told_once(caplog):
    """What is put around a block, such as a compiled module, replaces nothing."""
    model = nn.Sequential(nn.Sequential(*(zoo.GPTBlock(dropout=0.0) for _ in range(3))))
    adacc = served(model)
    model[0][1] = nn.Sequential(model[0][1])
    adacc.end_step()
    assert "no longer in the model" not in caplog.text
    model[0][2] = zoo.GPTBlock(dropout=0.0)
    for _ in range(2):
        adacc.end_step()
    assert caplog.text.count("no longer in the model: 1 of the 3 blocks found (the first: 0.2)") == 1


def test_a_layer_that_is_added_is_told_once(caplog):
    """A copy of a block runs like it, and what is put in the place of one is told as that."""
    model = nn.Sequential(nn.ModuleList(zoo.GPTBlock(dropout=0.0) for _ in range(3)))
    adacc = served(model)
    model[0].append(copy.deepcopy(model[0][1]))
    model[0].append(zoo.Tiny())
    model[0][0] = torch.compile(model[0][0])
    model[0][2] = zoo.GPTBlock(dropout=0.0)
    adacc.end_step()
    assert "no longer in the model: 1 of the 3 blocks found (the first: 0.2)" in caplog.text
    assert "were added to the model" not in caplog.text
    model[0].insert(0, zoo.GPTBlock(dropout=0.0))
    for _ in range(2):
        adacc.end_step()
    assert caplog.text.count("layers like the blocks found were added to the model: 2 (the first: 0.0)") == 1


class Sparse(nn.Module):
    """A layer with or without weights of its own."""

    def __init__(self, has_weights):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) if has_weights else nn.Identity() for _ in range(2))

    def forward(self, x):
        return self.parts[1](self.parts[0](x).sin())


def test_a_layer_that_was_left_out_from_the_beginning_is_no_news(caplog):
    model = nn.Sequential(nn.ModuleList(map(Sparse, (True, True, False))))
    blocks = find_blocks(model, "auto")
    assert list(blocks) == ["0.0", "0.1"]
    adacc = Adacc(Runtime(load({"adacc": {}}), has_engine=True), blocks, model=model)
    adacc.end_step()
    assert "were added to the model" not in caplog.text
    model[0].append(Sparse(True))
    adacc.end_step()
    assert "layers like the blocks found were added to the model: 1 (the first: 0.3)" in caplog.text
