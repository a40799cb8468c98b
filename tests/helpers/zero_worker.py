"""One rank of the ZeRO tests: trains every case with ds_adacc and without, and tells what it saw."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import asdict

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from replayed import replayed
from torch.multiprocessing.reductions import StorageWeakRef
from zero_cases import CASES, ds_config
from zero_models import batch, blocks_of, make

import ds_adacc
from ds_adacc.engine.zero3 import make_late_leaves

STEPS = 5
OVERFLOW = 4  # the step that overflows, in fp16: planned by then
# Any plan will do, and none is to be replaced because outliers have changed: then nothing is observed of the last one.
SECTION = {"rectifier": {"max_interval": 4, "drift": 10.0}, "solver": {"max_seconds": 2.0}}
BUDGET = {"none": 0.75, "paper": 0.5}  # in bf16, too little to do without loss


def train(case, section):
    """Losses of all micro steps, what is alive of the gathered parameters in the last one, and what was planned."""
    torch.manual_seed(0)
    model = make(case.model)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = ds_adacc.initialize(model=model, model_parameters=trained, config=ds_config(case, section))
    if case.reference_has_leaves and section is None:
        make_late_leaves(engine, dict(blocks_of(model).named_children()))
    watched = blocks_of(engine.module) if case.stage == 3 else []
    with watch_gathered(watched) as gathered:
        return run(case, engine, gathered)


def run(case, engine, gathered):
    random = torch.Generator().manual_seed(engine.global_rank)
    losses, scales = [], []
    for micro in range(case.micro_batches * STEPS):
        torch.manual_seed(100 * micro + engine.global_rank)
        gathered.clear()
        loss = engine(batch(random))
        losses.append(loss.item())
        gathered_bytes, after_forward = sum(size for _, size in gathered), alive_bytes(gathered)
        overflows = case.precision == "fp16" and engine.global_steps == OVERFLOW - 1 and engine.global_rank == 1
        engine.backward(loss * float("inf") if overflows else loss)
        after_backward = alive_bytes(gathered)
        engine.step()
        scales.append(engine.optimizer.loss_scale if case.precision == "fp16" else None)
    return {
        "losses": losses,
        "scales": scales,
        "skipped": engine.skipped_steps,
        "gathered_bytes": gathered_bytes,
        "alive_after_forward": after_forward,
        "alive_after_backward": after_backward,
        "plan": account(engine),
    }


def alive_bytes(gathered):
    return sum(size for reference, size in gathered if not reference.expired())


@contextmanager
def watch_gathered(blocks):
    """A list of the storages of the blocks' gathered parameters, which grows while forwards run.

    It is not filled by hooks of the blocks: such a hook is a part of the block, and its list would be guarded.
    """
    seen, watched = [], {module for block in blocks for module in block.modules()}
    original = PartitionedParameterCoordinator.fetch_sub_module

    def fetch(self, module, forward):
        original(self, module, forward)
        for parameter in module.parameters() if forward and module in watched else ():
            if not parameter.ds_persist and parameter.numel():
                storage = parameter.untyped_storage()
                seen.append((StorageWeakRef(storage), storage.nbytes()))

    PartitionedParameterCoordinator.fetch_sub_module = fetch
    try:
        yield seen
    finally:
        PartitionedParameterCoordinator.fetch_sub_module = original


def account(engine):
    adacc = getattr(engine, "adacc", None)
    if adacc is None:
        return None
    plan = adacc.runtime.controller.plan
    return {
        "policies": [asdict(policy) for chosen in plan.policies.values() for policy in chosen],
        "replays": replayed(plan),
        "block_types": [block_type.name for block_type in plan.block_types],
        "counts": [block_type.count for block_type in plan.block_types],
        "planned": adacc.planned_held_bytes,
        "observed": adacc.observed_held_bytes,
        "tracked_to": adacc.runtime.controller.planning.schedule.interval,
    }


def main(out, *names):
    get_accelerator().is_fp16_supported = lambda: True  # the CPU's operators take fp16; DeepSpeed asks for AVX-512
    deepspeed.init_distributed(dist_backend="gloo")
    results = {}
    for case in [case for case in CASES if case.name in names]:
        section = SECTION | {"codecs": case.codecs, "memory_budget": BUDGET[case.codecs], "max_gradient_error": None}
        results[case.name] = {"plain": train(case, None), "adacc": train(case, section)}
    return results
