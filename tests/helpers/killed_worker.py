"""One rank of a run that is killed, or of the run that goes on from its checkpoint: writes its losses as JSON."""

from __future__ import annotations

import argparse
import json
import os
import signal

import deepspeed
import torch
from replayed import replayed
from zero_cases import Case, ds_config
from zero_models import Model, batch

import ds_adacc

STEPS, SAVED = 5, 3
SECTION = {"memory_budget": 0.75, "codecs": "none"}


def start():
    torch.manual_seed(0)
    model = Model(layers=2)
    config = ds_config(Case(2), SECTION)
    engine, *_ = ds_adacc.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def step(engine):
    """One step on data of its own; returns the loss."""
    seed = 100 * engine.global_steps + engine.global_rank
    torch.manual_seed(seed)
    loss = engine(batch(torch.Generator().manual_seed(seed)))
    engine.backward(loss)
    engine.step()
    return loss.item()


def until_killed(out):
    """Save under a plan; then the second rank dies in the midst of a step, and the first waits for its gradients."""
    engine = start()
    for _ in range(SAVED):
        step(engine)
    engine.save_checkpoint(out)
    if engine.global_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    step(engine)


def resumed(out):
    engine = start()
    engine.load_checkpoint(out)
    losses = [step(engine) for _ in range(engine.global_steps, STEPS)]
    uninterrupted = start()
    whole = [step(uninterrupted) for _ in range(STEPS)]
    replays = any(replayed(engine.adacc.runtime.controller.plan))
    with open(os.path.join(out, f"rank{engine.global_rank}.json"), "w") as file:
        json.dump({"resumed": losses, "whole": whole, "replays": replays}, file)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank")
    parser.add_argument("what", choices=["killed", "resumed"])
    parser.add_argument("out")
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    {"killed": until_killed, "resumed": resumed}[args.what](args.out)


if __name__ == "__main__":
    main()
