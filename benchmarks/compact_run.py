"""One process of compact.py: a training run under a ds_config, or what its steps take of memory.

    python benchmarks/compact_run.py run RESULT CONFIG --work FOLDER --steps N --seed N
    python benchmarks/compact_run.py memory RESULT CONFIG

`run` writes one row of JSON a line to FOLDER/rows.jsonl: steps with their losses, and validations. Every SAVE steps it
saves a checkpoint there; started again, it goes on from the last one. RESULT is written at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import deepspeed
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from measure import WARM_UP_STEPS, Training
from memory import PeakMemory
from train import add_model_options, validate

SAVE, LOOKS = 250, 8  # steps between two checkpoints; validations of a run


def run(args: argparse.Namespace) -> dict[str, object]:
    """Train to the end, and return the last losses."""
    training, file = Training(args.config, args), args.work / "rows.jsonl"
    engine = training.engine
    if (args.work / "latest").exists():
        engine.load_checkpoint(args.work)
    done = engine.global_steps
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    rows = [row for row in rows if row["step"] <= done]
    for _ in range(done):  # the batches are a function of their position
        next(training.data)
    looks = {args.steps * look // LOOKS for look in range(1, LOOKS + 1)}
    with file.open("w") as output:
        for row in rows:
            print(json.dumps(row), file=output)
        for step in range(done + 1, args.steps + 1):
            begun = time.process_time()
            row = {"step": step, "loss": training.step()}
            row["cpu_seconds"] = time.process_time() - begun
            if step in looks:
                row["validation_loss"] = validate(engine, training.validation, args.context)
            rows.append(row)
            print(json.dumps(row), file=output, flush=True)
            if step % SAVE == 0 and step < args.steps:
                engine.save_checkpoint(args.work, tag="last")
    return {
        "training_loss": statistics.fmean(row["loss"] for row in rows[-max(args.steps // 10, 1) :]),
        "validation_loss": rows[-1]["validation_loss"],
        "cpu_seconds": statistics.median(row["cpu_seconds"] for row in rows),
    }


def memory(args: argparse.Namespace) -> dict[str, object]:
    """What a steady step takes, in bytes.

    Weights, gradients and optimizer states are counted. `activations_bytes` is the measured peak of forward and
    backward above the level before, when all of these are there.
    """
    training = Training(args.config, args)
    training.settle(WARM_UP_STEPS)
    _, peak = training.measured_step(PeakMemory(training.engine.device))
    engine = training.engine
    parameters = list(engine.module.parameters())
    states = [each for state in engine.optimizer.state.values() for each in state.values() if torch.is_tensor(each)]
    return {
        "weights_bytes": sum(each.nbytes for each in (*parameters, *engine.module.buffers())),
        "gradients_bytes": sum(parameter.nbytes for parameter in parameters if parameter.requires_grad),
        "states_bytes": sum(state.nbytes for state in states),
        "activations_bytes": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "memory"))
    parser.add_argument("result", type=Path)
    parser.add_argument("config")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--steps", type=int)
    add_model_options(parser)
    args = parser.parse_args()
    deepspeed.init_distributed()
    found = run(args) if args.what == "run" else memory(args)
    args.result.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
