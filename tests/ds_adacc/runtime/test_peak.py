"""No plan's measured peak exceeds its budget.

Measured: the bytes of all storages that operators of forward and backward make and that are alive at once, counted from
outside. It has no noise; the allowance is for what is not the blocks': the loss and the gradient of it.
"""

import gc

import pytest
import torch
import zoo
from storages import Storages
from torch import nn

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.runtime.runtime import Runtime

ALLOWANCE = 64
LAYERS, WIDTH, TIME = 6, 64, 256


class Model:
    """A stack of blocks whose parameters' gradients exist before, so that only activations are counted."""

    def __init__(self, make, layers=LAYERS):
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(make() for _ in range(layers))
        for parameter in self.blocks.parameters():
            parameter.grad = torch.zeros_like(parameter)
        # a leaf lives as long as the graph: the blocks' input is made from it
        self.leaf = torch.randn(4, TIME, WIDTH, requires_grad=True)
        self.leaf.grad = torch.zeros_like(self.leaf)
        self.weight = torch.randn(4, TIME, WIDTH)

    def step(self, call):
        x = self.leaf * 1.0
        for block in self.blocks:
            x = call(block, x)
        loss = (x * self.weight).sum()  # with a gradient that takes room
        del x  # the output of the last block is not the blocks' to hold
        loss.backward()

    def peak(self, call):
        gc.collect()
        gc.disable()
        with Storages() as storages:
            self.step(call)
        gc.enable()
        return storages.peak


@pytest.fixture(scope="module", params=["gpt", "bert"])
def model(request):
    make = {"gpt": lambda: zoo.GPTBlock(WIDTH, 4, 0.1), "bert": lambda: zoo.BertBlock(WIDTH, 4)}
    return Model(make[request.param])


def planned(model, codecs, budget):
    section = {"codecs": codecs, "memory_budget": budget, "solver": {"max_seconds": 30.0}}
    runtime = Runtime(load({"adacc": section}))
    for _ in range(6):
        model.step(runtime.checkpoint)
    return runtime


def smallest(model, codecs):
    with pytest.raises(planner.InfeasibleBudget) as refusal:
        planned(model, codecs, 1 << 20)
    return refusal.value.smallest


@pytest.mark.parametrize("codecs", ["none", "paper"])
@pytest.mark.parametrize("budget", [1.0, 0.6, 0.4, "smallest"])
def test_measured_peak_is_within_the_budget(model, codecs, budget):
    runtime = planned(model, codecs, smallest(model, codecs) if budget == "smallest" else budget)
    decision = runtime.decision
    assert decision.peak <= decision.budget
    assert model.peak(runtime.checkpoint) <= decision.budget + ALLOWANCE


def test_predicted_peak_without_checkpointing_is_what_is_measured(model):
    runtime = planned(model, "none", 1.0)
    measured = model.peak(lambda block, x: block(x))
    assert runtime.decision.without == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("codecs", ["none", "paper"])
def test_observed_bytes_are_the_planned_ones(model, codecs):
    runtime = planned(model, codecs, 0.5)
    assert runtime.held.observed == runtime.held.planned == runtime.decision.held


def test_memory_is_flat_over_many_steps():
    model = Model(lambda: zoo.GPTBlock(WIDTH, 4, 0.1), layers=2)
    runtime = planned(model, "paper", 0.6)
    gc.collect()
    gc.disable()
    with Storages() as storages:
        for step in range(12):
            model.step(runtime.checkpoint)
            if step == 2:
                early = storages.alive(), storages.peak
    gc.enable()
    assert (storages.alive(), storages.peak) == early
