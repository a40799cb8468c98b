"""One rank of the test of resumed runs: trains, saves, and goes on from the checkpoints with other engines."""

from __future__ import annotations

import hashlib
from dataclasses import asdict

import deepspeed
import torch
import torch.distributed as dist
from heard import heard
from zero_cases import Case, ds_config
from zero_models import Model

import ds_adacc

SECTION = {
    "codecs": "paper",
    "group_size": 16,
    "zscore_threshold": 4.0,
    "rectifier": {"max_interval": 4},
    "solver": {"max_seconds": 30.0},
}
SPIKE_AT, STEPS = 6, 11


def main(out):
    deepspeed.init_distributed(dist_backend="gloo")
    return {
        "0 nearest": interrupted(out / "zero0", 0, "nearest", saves=(1, 5), resumed=(1,), monitor=monitors(out)),
        "3 stochastic": interrupted(out / "zero3", 3, "stochastic", saves=(3,), resumed=(3,)),
        "damaged": on_one_rank_only(out / "zero0"),
    }


def interrupted(folder, stage, rounding, saves, resumed, monitor=None):
    """What a run showed that saved after these steps, and what others did, resumed after some; and it, rolled back."""
    first = engine_of(stage, rounding, monitor)
    whole = train(first, 0, folder, saves)
    parts = {}
    for step in resumed:
        parts[step] = from_checkpoint(engine_of(stage, rounding), folder, step)
    if stage == 0:
        parts[saves[-1]] = from_checkpoint(first, folder, saves[-1])
    return {"whole": whole, "resumed": parts}


def from_checkpoint(engine, folder, step):
    _, state = engine.load_checkpoint(folder, tag=f"after{step}")
    measured = engine.adacc.runtime.profiler.measured
    seen = train(engine, step)
    return {**seen, "measured": engine.adacc.runtime.profiler.measured - measured, "client_state": state["mine"]}


def on_one_rank_only(folder):
    """What is said, and left of the plan in force, where the second rank's file is damaged."""
    if dist.get_rank() == 1:
        (folder / "after1" / "adacc_rank_00001.pt").write_bytes(b"PK half a file")
    dist.barrier()
    engine = engine_of(0, "nearest")
    engine.load_checkpoint(folder, tag="after5")
    before = engine.adacc.runtime.controller.plan is not None
    lines = heard()
    engine.load_checkpoint(folder, tag="after1")
    return {"said": lines, "planned": [before, engine.adacc.runtime.controller.plan is not None]}


def engine_of(stage, rounding, monitor=None):
    torch.manual_seed(0)
    model = Model(layers=2)
    section = {**SECTION, "rounding": rounding, "memory_budget": 0.42}
    section["max_gradient_error"] = 0.5 if stage == 3 else None  # with a bound, lossy policies are tried
    config = ds_config(Case(stage, micro_batches=2), section) | (monitor or {})
    config["optimizer"]["params"]["lr"] = 1e-3
    engine, *_ = ds_adacc.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def monitors(out):
    return {
        "csv_monitor": {"enabled": True, "output_path": str(out), "job_name": "csv"},
        "tensorboard": {"enabled": True, "output_path": str(out), "job_name": "board"},
    }


def train(engine, begin, folder=None, saves=()):
    """All that must be the same in a resumed run, by step; the blocks' inputs get a heavy channel at one."""
    hook, seen = None, {"losses": [], "plans": [], "schedule": []}
    for step in range(begin, STEPS):
        if step == SPIKE_AT:
            hook = engine.module.blocks[1].register_forward_pre_hook(spike)
        for micro in range(2):
            torch.manual_seed(1000 * step + 10 * micro + engine.global_rank)
            loss = engine(torch.randint(64, (2, 32)))
            engine.backward(loss)
            engine.step()
            seen["losses"].append(loss.item())
        runtime = engine.adacc.runtime
        seen["plans"].append(
            [[asdict(policy) for policy in chosen] for chosen in runtime.controller.plan.policies.values()]
        )
        seen["schedule"].append(vars(engine.adacc.runtime.controller.planning.schedule))
        if step + 1 in saves:
            engine.save_checkpoint(folder, tag=f"after{step + 1}", client_state={"mine": step})
    hook.remove()
    return seen | {"parameters": parameters(engine), "channels": channels(engine.adacc.runtime)}


def spike(module, args):
    factors = torch.ones(args[0].shape[-1])
    factors[7] = 40.0
    return (args[0] * factors,)


def parameters(engine):
    """A hash of all parameters."""
    with deepspeed.zero.GatheredParameters(
        list(engine.module.parameters()), enabled=engine.zero_optimization_stage() == 3
    ):
        parts = [parameter.detach().numpy().tobytes() for parameter in engine.module.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def channels(runtime):
    """The first outlier channels of every block's values."""
    return [
        {index: (order[:4].tolist(), int(count)) for index, (order, count) in sorted(variant.outliers.items())}
        for _, variant in runtime.blocks.variants()
    ]
