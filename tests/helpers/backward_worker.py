"""Trains on one rank under each ZeRO stage: with a step of the optimizer between a forward and its backward; on
micro-batches of two lengths, whose backward the engine runs, or the loss itself; with steps of the optimizer itself;
with two engines whose models share their blocks.
"""

from __future__ import annotations

import deepspeed
import torch
import zoo
from torch import nn
from zero_cases import Case, ds_config

import ds_adacc

BUDGETS = {"plain": None, "replayed": 0.5, "retained": 1.0}
STEPS = 5


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(zoo.GPTBlock(dropout=0.0) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


class Generator(nn.Module):
    """A model with another one inside, which an engine of its own trains."""

    def __init__(self, judge):
        super().__init__()
        self.own, self.judge = Model(), judge

    def forward(self, x):
        return self.own(x)


def engine_of(stage, budget, micro_batches=1, model=None, trained=None):
    torch.manual_seed(0)
    model = model or Model()
    section = budget and {"memory_budget": budget, "codecs": "none", "solver": {"max_seconds": 30.0}}
    config = ds_config(Case(stage, micro_batches=micro_batches), section)
    return ds_adacc.initialize(model=model, model_parameters=(trained or model).parameters(), config=config)[0]


def train(stage, budget):
    """The losses, and what the backward said that came after a step. The first two steps are as usual."""
    engine = engine_of(stage, budget)
    random, losses, said, late = torch.Generator().manual_seed(1), [], None, None
    for step in range(STEPS):
        loss = engine(torch.randn(2, 8, zoo.WIDTH, generator=random))
        losses.append(loss.item())
        if step == 2:
            late = engine(torch.randn(2, 8, zoo.WIDTH, generator=random))
        if step == 3:
            loss = late
        try:
            engine.backward(loss)
        except RuntimeError as error:
            said = str(error)
            break
        engine.step()
    return {"losses": losses, "said": said}


def share(stage, trains_both):
    """What a backward said that came after a step of an earlier engine, whose model has the same blocks.

    Not `trains_both`: the earlier engine only uses them, as a generator uses its judge.
    """
    first = engine_of(stage, BUDGETS["replayed"])
    if trains_both:
        (last_model := Model()).blocks = first.module.blocks
    else:
        last_model = Model()
        first = Generator(last_model)
        first = engine_of(stage, BUDGETS["replayed"], model=first, trained=first.own)
    last = engine_of(stage, BUDGETS["replayed"], model=last_model)
    x = torch.randn(2, 8, zoo.WIDTH, generator=torch.Generator().manual_seed(1))
    loss, late = first(x), last(x)
    first.backward(loss)
    first.step()
    try:
        last.backward(late)
    except RuntimeError as error:
        return str(error)


def accumulate(stage, is_direct):
    """The losses; the sizes of the live sets that were planned for, and their peak without checkpointing."""
    engine = engine_of(stage, 0.6, micro_batches=2)
    random, losses = torch.Generator().manual_seed(1), []
    for length in (8, 12) * STEPS:
        loss = engine(torch.randn(2, length, zoo.WIDTH, generator=random))
        losses.append(loss.item())
        if is_direct:
            loss.backward()
        else:
            engine.backward(loss)
        engine.step()
    plan = engine.adacc.runtime.controller.plan
    live_sets = [len(names) for group in plan.groups for names in group.live_sets]
    peak = engine.adacc.runtime.controller.observation.peak
    return {
        "losses": losses,
        "live_sets": live_sets,
        "without": plan.without,
        "is_measured": peak is not None and peak.observed > 0,
        "profiler_runs": torch.autograd._profiler_enabled(),
    }


def step_of_optimizer(stage, budget):
    """The losses, and how many calls were recorded, where the program steps the optimizer, not the engine."""
    engine = engine_of(stage, budget)
    x, losses = torch.randn(2, 8, zoo.WIDTH, generator=torch.Generator().manual_seed(1)), []
    for _ in range(STEPS):
        loss = engine(x)
        losses.append(loss.item())
        engine.backward(loss)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    adacc = getattr(engine, "adacc", None)
    return {"losses": losses, "has_plan": adacc is not None and adacc.runtime.controller.plan is not None}


def results(stage):
    late = {name: train(stage, budget) for name, budget in BUDGETS.items()}
    late |= {f"{name} by optimizer": step_of_optimizer(stage, BUDGETS[name]) for name in ("plain", "replayed")}
    if stage == 1:  # DeepSpeed refuses to reduce a gradient twice under stage 2
        late["shared"], late["used"] = share(stage, trains_both=True), share(stage, trains_both=False)
    return {**late, "by_engine": accumulate(stage, is_direct=False), "direct": accumulate(stage, is_direct=True)}


def main(out, *stages):
    deepspeed.init_distributed(dist_backend="gloo")
    return {stage: results(int(stage)) for stage in stages}
