"""Outliers and sharp attention, as large models grow them: no plan exceeds the bound on the gradient error."""

import pytest
import torch
from injections import INJECTIONS, inject, kill_units
from train import GPT

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.engine.adacc import Adacc
from ds_adacc.runtime.runtime import Runtime

BOUND = 0.1
TOKENS = torch.randint(256, (2, 65), generator=torch.Generator().manual_seed(1))


def errors(injection, steps=5, **section):
    """The relative errors of the whole model's gradient in the first steps."""
    runtime = Runtime(load({"adacc": {"solver": {"max_seconds": 10.0}, **section}}), has_engine=True)
    adacc = Adacc(runtime)
    torch.manual_seed(0)
    gpt = GPT(layers=4, width=128, heads=4, context=64)
    kill_units(gpt)
    inject(gpt, INJECTIONS[injection])

    def gradient(checkpoint):
        gpt.checkpoint = checkpoint
        gpt.zero_grad()
        gpt(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
        return torch.cat([parameter.grad.flatten() for parameter in gpt.parameters()])

    exact, found = gradient(None), []
    for _ in range(steps):
        found.append(float((gradient(runtime.checkpoint) - exact).norm() / exact.norm()))
        adacc.end_step()
    return found


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("injection", "codecs"), [*((name, "auto") for name in INJECTIONS if name != "plain"), ("all", "paper")]
)
@pytest.mark.usefixtures("slow_replays")
def test_the_gradient_keeps_the_bound(injection, codecs):
    found = max(errors(injection, codecs=codecs, memory_budget=0.4))
    assert found <= 2 * BOUND
    assert found > 0 or codecs == "paper"  # whose codecs may all be too coarse here


def test_under_a_lean_budget_too():
    assert max(errors("all", memory_budget=0.25)) <= 2 * BOUND


def test_at_the_smallest_budget_too():
    with pytest.raises(planner.InfeasibleBudget) as refusal:
        errors("all", memory_budget="100KiB")
    assert 0 < max(errors("all", memory_budget=refusal.value.smallest)) <= 2 * BOUND


def test_without_a_bound_the_gradient_does_not():
    assert max(errors("all", codecs="quantization", memory_budget=0.4)) > 2 * BOUND
