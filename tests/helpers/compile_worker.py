"""One rank of the tests of compiled blocks under an engine: trains with ds_adacc and without, writes JSON."""

from __future__ import annotations

from dataclasses import asdict

import deepspeed
import torch
from zero_cases import Case, ds_config
from zero_models import TOKENS, Model

import ds_adacc
from ds_adacc.profile import operator_costs

STEPS = 4
LENGTH = 48  # as in tests of single blocks: what Inductor has made for these is found on disk
SECTIONS = {
    "engine": {"memory_budget": 0.999, "codecs": {"dropout_mask": "bits"}},
    "blocks": {"memory_budget": 0.9, "codecs": "paper", "max_gradient_error": None},
    "inductor": {"memory_budget": 0.8},
}
CASES = {"engine": Case(3), "blocks": Case(2, "bf16"), "inductor": Case(1)}


def optimized(model, backend):
    for name, block in model.blocks.named_children():
        model.blocks[int(name)] = torch.compile(block, backend=backend)


def train(name, section):
    """Losses by step, and what was planned.

    Inductor alone makes other random numbers of a whole model than of its blocks: without ds_adacc these are compiled
    by themselves in "inductor".
    """
    torch.manual_seed(0)
    model = Model(layers=2)
    if name == "blocks":
        optimized(model, "aot_eager")
    elif name == "inductor" and section is None:
        optimized(model, "inductor")
    config = ds_config(CASES[name], section)
    engine, *_ = ds_adacc.initialize(model=model, model_parameters=model.parameters(), config=config)
    if name == "engine":
        engine.compile(backend="aot_eager")
    elif name == "inductor" and section is not None:
        engine.compile()
    random = torch.Generator().manual_seed(engine.global_rank)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(100 * step + engine.global_rank)
        loss = engine(torch.randint(TOKENS, (2, LENGTH), generator=random))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return {"losses": losses, "plan": account(engine) if section else None}


def account(engine):
    runtime = engine.adacc.runtime
    return {
        "compiled": [block_type.recording.runs_compiled for block_type in runtime.agreement.known_types.values()],
        "policies": [asdict(policy) for chosen in runtime.controller.plan.policies.values() for policy in chosen],
        "measured": any(types.errors_are_measured for types in runtime.agreement.known_types.values()),
        "planned": engine.adacc.planned_held_bytes,
        "observed": engine.adacc.observed_held_bytes,
    }


def main(out, *run):
    operator_costs.replay_seconds = lambda *_: 1e-2  # codecs are quicker, on any machine: a plan that may be lossy is
    deepspeed.init_distributed(dist_backend="gloo")
    # ZeRO-3 comes last: it leaves a linear function of its own in torch, which is then compiled around the blocks.
    names = sorted(run, key=lambda name: CASES[name].stage)
    return {name: {"plain": train(name, None), "adacc": train(name, SECTIONS[name])} for name in names}
