"""One stage of the pipeline tests: trains a small GPT several ways and tells what it saw."""

from __future__ import annotations

import deepspeed
import torch
import zoo
from deepspeed.pipe import LayerSpec, PipelineModule
from replayed import replayed
from torch import nn

import ds_adacc
from ds_adacc import checkpointing

STEPS, MICRO, LAYERS = 4, 4, 6
SECTION = {"memory_budget": 0.8, "codecs": "none", "rectifier": {"max_interval": 2}, "solver": {"max_seconds": 30.0}}

LATER = ({}, {"adacc": {"enabled": False}}, {"adacc": SECTION})


class Embedding(nn.Embedding):
    def __init__(self):
        super().__init__(64, zoo.WIDTH)


class Late(zoo.GPTBlock):
    """Blocks of the second stage."""


class Head(nn.Linear):
    def __init__(self):
        super().__init__(zoo.WIDTH, 64)


def loss_of(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batches():
    generator = torch.Generator().manual_seed(3)
    while True:
        tokens = torch.randint(64, (2, 17), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def train(section=None, use_reentrant=True, configured=False, **arguments):
    """Losses of all steps, the parameters' sum at the end, and what was planned."""
    torch.manual_seed(0)
    blocks = [LayerSpec(each) for each in (zoo.GPTBlock, Late) for _ in range(LAYERS // 2)]
    layers = [LayerSpec(Embedding), *blocks, LayerSpec(Head)]
    model = PipelineModule(layers, num_stages=2, loss_fn=loss_of, partition_method="uniform", **arguments)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "steps_per_print": 1 << 30,
        "pipeline": {"use_reentrant": use_reentrant},
    }
    config |= {"adacc": section} if section else {}
    if configured:
        checkpointing.configure(None, {"adacc": SECTION})
    start = ds_adacc.initialize if section else deepspeed.initialize
    engine, *_ = start(model=model, model_parameters=model.parameters(), config=config)
    data = batches()
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        losses.append(engine.train_batch(data).item())
    engine.eval_batch(data)
    told = {"losses": losses, "parameters": [p.double().sum().item() for p in model.parameters()]}
    told["plan"] = account(engine.adacc.runtime if section else checkpointing.registry.runtime, engine)
    checkpointing.registry.reset()
    return told


def functions_after(section):
    """Whether the pipeline's function is ds_adacc's: under an engine, and under a later one with this section."""
    layers = [LayerSpec(zoo.GPTBlock), LayerSpec(zoo.GPTBlock)]
    model = PipelineModule(layers, num_stages=2, loss_fn=loss_of, activation_checkpoint_interval=1)
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    functions = []
    for each in ({"adacc": SECTION}, section):
        ds_adacc.initialize(model=model, model_parameters=model.parameters(), config={**config, **each})
        functions.append(model.activation_checkpoint_func)
    checkpointing.registry.reset()
    assert {*functions} <= {checkpointing.checkpoint, deepspeed.checkpointing.checkpoint}
    return [each is checkpointing.checkpoint for each in functions]


def account(runtime, engine):
    if runtime is None:
        return None
    return {
        "recordings": runtime.recordings,
        "block_types": len(runtime.agreement.known_types),
        "counts": sorted(block_type.count for block_type in runtime.agreement.known_types.values()),
        "names": [block.name for block in runtime.blocks.all()],
        "blocks": sum(bool(block.variants()) for block in runtime.blocks.all()),
        "replays": any(replayed(runtime.controller.plan)),
        "held": runtime.controller.observation
        and [runtime.controller.observation.held.planned, runtime.controller.observation.held.observed],
        "peak": runtime.controller.observation
        and runtime.controller.observation.peak
        and [runtime.controller.observation.peak.planned, runtime.controller.observation.peak.observed],
        "ranks": runtime.controller.ranks.size,
        "steps": runtime.controller.planning.schedule.ended,
        "wrapped": sum("forward" in vars(module) for module in engine.module.modules()),
    }


def main(out):
    deepspeed.init_distributed(dist_backend="gloo")
    ours = {"activation_checkpoint_func": checkpointing.checkpoint}
    return {
        "plain": train(),
        "interval 1": train(SECTION, activation_checkpoint_interval=1, **ours),
        "interval 2": train(SECTION, activation_checkpoint_interval=2, **ours),
        "deepspeed's function": train(SECTION, use_reentrant=False, activation_checkpoint_interval=2),
        "wrapped blocks": train(SECTION),
        "named blocks": train({**SECTION, "blocks": ["GPTBlock", "Late"]}),
        "without an engine": train(configured=True, activation_checkpoint_interval=1, **ours),
        "a later engine": {str(each): functions_after(each) for each in LATER},
    }
