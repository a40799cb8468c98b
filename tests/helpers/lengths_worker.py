"""One rank of the test of lengths: batches of another length on each rank at every step, under ZeRO 1 and 3."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import asdict

import deepspeed
import torch
import torch.distributed as dist
from held import watch_held
from zero_cases import Case, ds_config
from zero_models import Model

import ds_adacc
from ds_adacc.engine.zero3 import make_late_leaves
from ds_adacc.plan.coordinator import Coordinator
from ds_adacc.plan.ranks import Ranks

STEPS = 20
LONGEST = 48
SECTION = {"memory_budget": 0.6, "codecs": "none", "rectifier": {"max_interval": 16}, "solver": {"max_seconds": 30}}
LOSSY = {  # of narrow blocks the outliers differ from batch to batch: a new plan at most tracking steps
    **SECTION,
    "codecs": "paper",
    "group_size": 16,
    "max_gradient_error": None,
    "rectifier": {"max_interval": 4, "drift": 0.01},
}
COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"),
    *("broadcast", "barrier", "all_gather_object", "broadcast_object_list"),
)
ASKED = {Ranks: ("any", "vote", "gather", "on_first"), Coordinator: ("decide", "_solve")}
counted = Counter()


def count(owner, name):
    """Have each call of `owner`'s function `name` counted."""
    function = getattr(owner, name)

    def counting(*args, **kwargs):
        counted[name] += 1
        return function(*args, **kwargs)

    setattr(owner, name, counting)


def lengths(rank):
    """None of them comes twice, nor on both ranks in one step; the longest comes first."""
    drawn = random.Random(0).sample(range(8, LONGEST), 2 * (STEPS - 1))
    return [LONGEST + rank, *drawn[rank::2]]


def train(stage, section, until=STEPS):
    torch.manual_seed(0)
    model = Model()
    config = ds_config(Case(stage), section)
    engine, *_ = ds_adacc.initialize(model=model, model_parameters=model.parameters(), config=config)
    if stage == 3 and section is None:
        make_late_leaves(engine, dict(model.blocks.named_children()))  # as ds_adacc: whole blocks are gathered at once
    rank, adacc = engine.global_rank, getattr(engine, "adacc", None)
    pairs = watch_held(adacc.runtime.controller) if adacc else []
    tokens, steps = torch.Generator().manual_seed(rank), []
    for number, length in enumerate(lengths(rank)[:until]):
        torch.manual_seed(100 * number + rank)
        counted.clear()
        purpose = adacc and adacc.runtime.controller.step.purpose.value
        loss = engine(torch.randint(64, (2, length), generator=tokens))
        engine.backward(loss)
        engine.step()
        seen = {"length": length, "loss": loss.item(), "collectives": sum(counted[name] for name in COLLECTIVES)}
        if adacc is not None:
            asked = {name: counted[name] for names in ASKED.values() for name in names}
            seen |= {"purpose": purpose, "asked": asked, "recordings": adacc.runtime.recordings, "held": pairs[-1]}
            seen["schedule"] = asdict(adacc.runtime.controller.planning.schedule)
            seen["reason"] = adacc.runtime.controller.plan.reason
        steps.append(seen)
    return steps


def main(out, *stages):
    for name in COLLECTIVES:
        count(dist, name)
    for owner, names in ASKED.items():
        for name in names:
            count(owner, name)
    deepspeed.init_distributed(dist_backend="gloo")
    results = {stage: [train(int(stage), section) for section in (None, SECTION)] for stage in stages}
    results["lossy"] = train(1, LOSSY, until=12)
    return results
