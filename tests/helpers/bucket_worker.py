"""Trains on one rank with DeepSpeed's default bucket sizes, in cases where backward begins inside the blocks."""

from __future__ import annotations

import logging

import deepspeed
import torch
import zoo
from heard import heard
from torch import nn

import ds_adacc

STAGES, HEADS = (1, 2, 3), ("lora", "frozen head", "no head")
STEPS, LAYERS, TIME, WIDTH = 3, 3, 128, 64


class LowRank(nn.Module):
    """A frozen linear layer, and a trained one of low rank beside it."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, 4, bias=False)
        self.up = nn.Linear(4, linear.out_features, bias=False)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))


class Model(nn.Module):
    """The loss comes after a trained head, a frozen one, or straight after the last block."""

    def __init__(self, head):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(zoo.GPTBlock(WIDTH, 4, 0.0) for _ in range(LAYERS))
        self.head = nn.Identity() if head == "no head" else nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        if head == "lora":
            self.blocks.requires_grad_(False)
            for block in self.blocks:
                block.fc1 = LowRank(block.fc1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return (self.head(x) ** 2).mean()


def train(case, section):
    """The losses, and the peak as planned and as observed."""
    stage, head, overlap = case.split(" ", 1)[0], case.split(" ", 1)[1].rsplit(" ", 1)[0], case.endswith("overlap")
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": int(stage), "overlap_comm": overlap},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1 << 30,
    } | ({"adacc": section} if section else {})
    torch.manual_seed(0)
    model = Model(head)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = ds_adacc.initialize(model=model, model_parameters=trained, config=config)
    losses, random = [], torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        loss = engine(torch.randn(4, TIME, WIDTH, generator=random))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if section is None:
        return {"losses": losses}
    controller = engine.adacc.runtime.controller
    seen = controller.observation.peak
    return {
        "losses": losses,
        "shortfalls": [group.shortfall for group in controller.plan.groups if group.shortfall],
        "planned": controller.plan.peak,
        "observed": None if seen is None else seen.observed,
        "budget": controller.plan.budget,
    }


def main(out, *cases):
    deepspeed.init_distributed(dist_backend="gloo")
    results, warnings = {}, heard(logging.WARNING)
    for case in cases:
        warnings.clear()
        found = train(case, {"codecs": "none", "memory_budget": 0.8, "solver": {"max_seconds": 30.0}})
        results[case] = found | {"plain": train(case, None)["losses"], "warnings": list(warnings)}
    return results
