"""A script that knows DeepSpeed or accelerate alone: trains with the section on, then off, and writes what it saw."""

import argparse
import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState
from deepspeed import initialize
from zero_cases import Case, ds_config
from zero_models import Model

SECTION = {"memory_budget": 0.75, "codecs": "none", "solver": {"max_seconds": 30.0}}


def by_deepspeed(model, config):
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine, engine.backward, engine.step


def by_accelerate(model, config):
    AcceleratorState._reset_state(reset_partial_state=True)
    del config["optimizer"]
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return model, accelerator.backward, optimizer.step


def train(prepare, section):
    torch.manual_seed(0)
    config = ds_config(Case(1), section) | {"zero_allow_untested_optimizer": True}
    engine, backward, step = prepare(Model(), config)
    losses = []
    for number in range(4):
        torch.manual_seed(number)
        loss = engine(torch.randint(64, (2, 16)))
        backward(loss)
        step()
        losses.append(loss.item())
    adacc = getattr(engine, "adacc", None)
    return {"losses": losses, "held": adacc and adacc.observed_held_bytes}


parser = argparse.ArgumentParser()
parser.add_argument("by", choices=["deepspeed", "accelerate"])
parser.add_argument("out")
parser.add_argument("--local_rank", type=int)
arguments = parser.parse_args()
prepare = by_deepspeed if arguments.by == "deepspeed" else by_accelerate
seen = {"argv": sys.argv, "path": sys.path[0]}
for name, enabled in (("on", True), ("off", False)):
    seen[name] = train(prepare, SECTION | {"enabled": enabled})
Path(arguments.out).write_text(json.dumps(seen))
