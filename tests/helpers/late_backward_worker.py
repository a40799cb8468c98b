"""Trains on one rank under each ZeRO stage, with a step of the optimizer between a forward and its backward."""

from __future__ import annotations

import json
import sys

import deepspeed
import torch
import zoo
from torch import nn
from zero_cases import Case, ds_config

import ds_adacc

STAGES = (1, 2, 3)
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


def train(stage, budget):
    """The losses, and what the backward said that came after a step. The first two steps are as usual."""
    torch.manual_seed(0)
    model = Model()
    section = budget and {"memory_budget": budget, "codecs": "none", "solver": {"max_seconds": 30.0}}
    config = ds_config(Case(stage), section)
    engine, *_ = ds_adacc.initialize(model=model, model_parameters=model.parameters(), config=config)
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


def main(out):
    deepspeed.init_distributed(dist_backend="gloo")
    with open(out, "w") as file:
        json.dump({stage: {name: train(stage, budget) for name, budget in BUDGETS.items()} for stage in STAGES}, file)


if __name__ == "__main__":
    main(sys.argv[1])
