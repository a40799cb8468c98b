"""One rank of the uneven test: ranks differ in data, shapes and speed, under ZeRO-3, where all gather together."""

from __future__ import annotations

import random
import time
from dataclasses import asdict

import deepspeed
import torch
from zero_cases import Case, ds_config
from zero_models import Model

import ds_adacc

COMMON = (2, 16)
# batch and length by step, of the first rank and of the second; the last are epochs' ends
SHAPES = {4: (COMMON, (1, 16)), 5: ((2, 12), (3, 9)), 7: ((1, 16), COMMON)}
STEPS = 9
SECTIONS = {
    "plain": None,
    "none": {"memory_budget": 0.75, "codecs": "none", "rectifier": {"max_interval": 2}, "solver": {"max_seconds": 30}},
    "paper": {
        "memory_budget": 0.6,
        "group_size": 16,
        "rectifier": {"max_interval": 2, "drift": 0.01},
        "solver": {"max_seconds": 30},
    },
}


def train(section):
    torch.manual_seed(0)
    model = Model()
    config = ds_config(Case(3), section)
    engine, *_ = ds_adacc.initialize(model=model, model_parameters=model.parameters(), config=config)
    rank = engine.global_rank
    tokens, nap = torch.Generator().manual_seed(rank), random.Random(rank)
    losses, met = [], set()
    for step in range(1, STEPS + 1):
        torch.manual_seed(100 * step + rank)
        shape = SHAPES.get(step, (COMMON, COMMON))[rank]
        loss = engine(torch.randint(64, shape, generator=tokens))
        time.sleep(nap.choice((0, 0, 0.05)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        met |= set(engine.adacc.runtime.agreement.known_types) if section else set()
    return {"losses": losses, "met": sorted(met), **(told(engine) if section else {})}


def told(engine):
    """The policies in force, and for how many block types this rank has them."""
    agreement = engine.adacc.runtime.agreement
    policies = {digest: [asdict(p) for p in agreed.policies] for digest, agreed in agreement.type_plans.items()}
    return {"policies": policies, "own": sorted(agreement.known_types), "undecided": list(agreement.undecided)}


def main(out):
    deepspeed.init_distributed(dist_backend="gloo")
    return {name: train(section) for name, section in SECTIONS.items()}
