"""One rank of the ZeRO tests: trains a small GPT under every stage and precision, and writes what it saw as JSON."""

from __future__ import annotations

import json
import os
import sys

import deepspeed
import torch
import zoo
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import ds_adacc

STEPS = 5


class Model(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.embedding = nn.Embedding(64, zoo.WIDTH)
        self.blocks = nn.ModuleList(zoo.GPTBlock() for _ in range(layers))
        self.head = nn.Linear(zoo.WIDTH, 64)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def ds_config(stage, precision, section):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 1 << 30,
    }
    if stage == 3:
        config["zero_optimization"] |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_max_live_parameters": 0,
            "stage3_prefetch_bucket_size": 0,
        }
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    return config | ({"adacc": section} if section else {})


def train(stage, precision, section):
    """Losses of all micro steps, what is alive of the gathered parameters in the last one, and what was planned."""
    torch.manual_seed(0)
    model = Model()
    config = ds_config(stage, precision, section)
    engine, *_ = ds_adacc.initialize(model=model, model_parameters=model.parameters(), config=config)
    gathered = watch_gathered(engine.module.blocks) if stage == 3 else []
    random = torch.Generator().manual_seed(engine.global_rank)
    losses = []
    for micro in range(2 * STEPS):
        torch.manual_seed(100 * micro + engine.global_rank)
        gathered.clear()
        loss = engine(torch.randint(64, (2, 16), generator=random))
        gathered_bytes, after_forward = sum(size for _, size in gathered), alive_bytes(gathered)
        engine.backward(loss)
        after_backward = alive_bytes(gathered)
        engine.step()
        losses.append(loss.item())
    return {
        "losses": losses,
        "gathered_bytes": gathered_bytes,
        "alive_after_forward": after_forward,
        "alive_after_backward": after_backward,
        "plan": account(engine),
    }


def alive_bytes(gathered):
    return sum(size for reference, size in gathered if not reference.expired())


def watch_gathered(blocks):
    """A list that collects the storages of the blocks' gathered parameters while their forwards run."""
    seen = []

    def note(module, args):
        for parameter in module.parameters():
            storage = parameter.untyped_storage()
            seen.append((StorageWeakRef(storage), storage.nbytes()))

    for block in blocks:
        block.fc1.register_forward_pre_hook(note)
        block.register_forward_pre_hook(note)
    return seen


def account(engine):
    adacc = getattr(engine, "adacc", None)
    if adacc is None:
        return None
    decision = adacc.runtime.decision
    return {
        "policies": [policy.to_json() for chosen in decision.policies.values() for policy in chosen],
        "kinds": [kind.name for kind in decision.kinds],
        "counts": [kind.count for kind in decision.kinds],
        "planned": decision.held,
        "observed": adacc.observed_held_bytes,
        "tracked_to": adacc.rectifier.interval if adacc.rectifier else None,
    }


def main(out):
    deepspeed.init_distributed(dist_backend="gloo")
    section = {
        "memory_budget": 0.75,
        "codecs": "none",
        "rectifier": {"max_interval": 4},
        "solver": {"max_seconds": 30.0},
    }
    results = {}
    for precision in ("fp32", "bf16"):
        for stage in (0, 1, 2, 3):
            name = f"{precision} {stage}"
            results[name] = {"plain": train(stage, precision, None), "adacc": train(stage, precision, section)}
    with open(os.path.join(out, f"rank{os.environ['RANK']}.json"), "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(sys.argv[1])
