"""One rank of the rectifier's test: outliers appear on the second rank alone."""

from __future__ import annotations

import os
from dataclasses import asdict

import deepspeed
import torch
from zero_cases import Case, ds_config
from zero_models import Model

import ds_adacc
from ds_adacc.profile import operator_costs

# With slow replays, this budget has the first LayerNorm's output held by the codec that separates outliers.
SECTION = {
    "memory_budget": 0.45,
    "codecs": "paper",
    "group_size": 16,
    "zscore_threshold": 4.0,
    "solver": {"max_seconds": 10.0},
}
INJECT_AT, STEPS = 5, 10


def main(out):
    operator_costs.replay_seconds = lambda *_: 1e-2
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = Model()
    config = ds_config(Case(1), SECTION)
    config["optimizer"]["params"]["lr"] = 1e-5
    engine, *_ = ds_adacc.initialize(model=model, model_parameters=model.parameters(), config=config)
    agreement = engine.adacc.runtime.agreement
    seen, steps, before = None, [], None
    for step in range(1, STEPS + 1):
        tokens = torch.randint(64, (2, 48))
        if step == INJECT_AT:
            before = capacities(agreement)
            engine.module.blocks[0].register_forward_pre_hook(spike)
        engine.backward(engine(tokens))
        engine.step()
        if engine.adacc.runtime.controller.plan is not seen:
            seen = engine.adacc.runtime.controller.plan
            steps.append(step)
    return {
        "steps_of_decisions": steps,
        "policies": [[asdict(policy) for policy in chosen] for chosen in seen.policies.values()],
        "capacity": capacities(agreement),
        "capacity_before": before,
    }


def capacities(agreement):
    return {digest: sorted(block_type.capacity.items()) for digest, block_type in agreement.known_types.items()}


def spike(module, args):
    """On the second rank the first LayerNorm's output gets a heavy channel."""
    if os.environ["RANK"] == "1":
        with torch.no_grad():
            module.ln1.weight[7] = 40.0
