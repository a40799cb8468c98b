"""CompAct beside full training: the losses of long runs, and where the memory of a step goes.

    python benchmarks/compact.py --out benchmarks/results --work FOLDER [--steps 2000] [--seeds 2]
    python benchmarks/compact.py --out benchmarks/results --work FOLDER --arms full n/4 --steps 200 --seeds 1

A byte GPT of four layers trains on Python's own sources, on one rank without ZeRO: fully, and with CompAct at three
ranks, each seed with the same weights and batches. Each run is a process of one thread; --processes of them run at
once. FOLDER gets the rows of each run as they come, and checkpoints. Start the same command again after a break: it
goes on where each run was. The report, compact.md and compact.json, is of all runs that have ended.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from markdown_table import markdown_table
from origin import origin, publish
from processes import EXACT_MALLOC, KEEPING_MALLOC, ROOT, alone

from ds_adacc.environment import device_name

FULL = "full"
RANKS = {"n/2": 0.5, "n/4": 0.25, "n/8": 0.125}
MODEL = {"layers": 4, "width": 256, "heads": 4, "context": 128}
# Activations of the size of compare.py's, and states large enough to be seen beside them.
MEMORY_MODEL = {"layers": 12, "width": 192, "heads": 6, "context": 128}
RATE = 1e-3  # the peak of the learning rate
MIB = 1 << 20

# Shamshoum et al., table 1: perplexity of LLaMA 60M, 130M, 350M and 1B, trained fully and with CompAct.
PAPER = {
    FULL: (34.06, 25.08, 18.80, 15.56),
    "n/2": (32.78, 25.37, 19.26, 17.40),
    "n/4": (34.41, 26.98, 20.45, 18.02),
    "n/8": (36.42, 28.70, 21.91, 19.23),
}
STRATEGIES = {
    "no checkpointing": "none",
    "DeepSpeed, full checkpointing": "full_checkpointing",
    "Adacc, budget 0.4": "adacc",
    "Adacc with CompAct, n/4, budget 0.4": "compact",
}


def config_of(arm: str, scale: float) -> dict[str, Any]:
    """The ds_config of an arm of the training runs. All differ in `compact` only; nothing is planned."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 1.0,
        "steps_per_print": 1 << 30,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": RATE, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.0, "warmup_max_lr": RATE, "warmup_num_steps": 50, "warmup_type": "linear"},
        },
    }
    if arm != FULL:
        # Every tensor is retained, so that nothing but CompAct changes the gradient.
        config["adacc"] = {"codecs": "none", "memory_budget": "1TiB", "compact": {"rank": RANKS[arm], "scale": scale}}
    return config


def options(model: Mapping[str, int]) -> list[str]:
    return [word for name, value in model.items() for word in (f"--{name}", str(value))]


def train(arm: str, seed: int, work: Path, steps: int, scale: float) -> dict[str, Any]:
    """What one run found, now or when it ended."""
    folder = work / f"{arm.replace('/', '_')}.{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    config, result = folder / "config.json", folder / "result.json"
    if not result.exists():
        config.write_text(json.dumps(config_of(arm, scale), indent=1) + "\n")
        arguments = ["run", result, config, "--work", folder, "--steps", steps, "--seed", seed, *options(MODEL)]
        alone("benchmarks/compact_run.py", [str(each) for each in arguments], KEEPING_MALLOC, result)
    return {"arm": arm, "seed": seed, **json.loads(result.read_text())}


def measure_memory(name: str, work: Path) -> dict[str, Any]:
    """What one strategy takes, without ZeRO: on one rank there is nothing to partition."""
    config = json.loads((ROOT / "ds_configs" / f"{STRATEGIES[name]}.json").read_text())
    config["zero_optimization"] = {"stage": 0}
    file, result = work / f"memory.{STRATEGIES[name]}.config.json", work / f"memory.{STRATEGIES[name]}.json"
    if not result.exists():
        file.write_text(json.dumps(config, indent=1) + "\n")
        arguments = ["memory", result, file, *options(MEMORY_MODEL)]
        alone("benchmarks/compact_run.py", [str(each) for each in arguments], EXACT_MALLOC, result)
    return {"strategy": name, **json.loads(result.read_text())}


def losses_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """A row for each arm: losses, their differences to full training of the same seed, and those of the paper."""
    header = ["arm", "seeds", "training loss", "validation loss", "above full training", "CPU time of a step", "paper"]
    rows = []
    full = {run["seed"]: run for run in runs if run["arm"] == FULL}
    for arm in (FULL, *RANKS):
        found = [run for run in runs if run["arm"] == arm]
        if not found:
            continue
        paired = [run for run in found if run["seed"] in full]
        above = [run["validation_loss"] - full[run["seed"]]["validation_loss"] for run in paired]
        paper = ", ".join(f"{mine - whole:+.2f}" for mine, whole in zip(PAPER[arm], PAPER[FULL], strict=True))
        rows.append(
            (
                arm,
                len(found),
                _spread([run["training_loss"] for run in found], "{:.4f}"),
                _spread([run["validation_loss"] for run in found], "{:.4f}"),
                "" if arm == FULL or not above else _spread(above, "{:+.4f}"),
                f"{1000 * statistics.fmean(run['cpu_seconds'] for run in found):.0f} ms",
                "" if arm == FULL else paper,
            )
        )
    return markdown_table(header, rows)


def memory_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row for each strategy: its bytes, and their sum beside that of no checkpointing."""
    parts = ("weights_bytes", "gradients_bytes", "states_bytes", "activations_bytes")
    header = ["strategy", "whole peak", "of none", "weights", "gradients", "Adam's states", "activations"]
    lines = []
    wholes = [sum(row[part] for part in parts) for row in rows]
    for row, whole in zip(rows, wholes, strict=True):
        mib = [f"{size / MIB:.1f} MiB" for size in (whole, *(row[part] for part in parts))]
        lines.append([row["strategy"], mib[0], f"{whole / wholes[0]:.2f}", *mib[1:]])
    return markdown_table(header, lines)


NOTE = """\
Losses: a GPT of four layers, 256 wide, 128 bytes, batch 8, AdamW at 1e-3 with 50 steps of warm-up, clipping at 1. The
training loss is the mean of the last tenth of all steps; ± is the standard deviation over seeds. *Above full training*
is the validation loss less that of full training from the same seed. *Paper*: differences in perplexity of LLaMA 60M,
130M, 350M and 1B (Shamshoum et al., table 1), which is another measure, of other models and data.

Memory: a GPT of twelve layers, 192 wide, 128 bytes, batch 8, fp32, without ZeRO. Weights (with CompAct's proxies),
gradients and states are counted. *Activations* is the measured peak of forward and backward in a steady step, above the
level before. The *whole peak* is the sum."""


def report(
    out: Path, runs: Sequence[Mapping[str, Any]], memory: Sequence[Mapping[str, Any]], setting: Mapping[str, Any]
) -> None:
    """Write the tables for people and for programs, with where they come from."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    about = origin(device_name(device)) | {key: str(setting[key]) for key in ("steps", "scale")}
    tables = f"{losses_table(runs)}\n\n{memory_table(memory)}"
    publish(out / "compact", about, f"{tables}\n\n{NOTE}", runs=list(runs), memory=list(memory))
    print(tables)


def _spread(numbers: Sequence[float], form: str) -> str:
    mean = form.format(statistics.fmean(numbers))
    return f"{mean} ± {statistics.stdev(numbers):.4f}" if len(numbers) > 1 else mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the report")
    parser.add_argument("--work", type=Path, required=True, help="a folder for rows and checkpoints")
    parser.add_argument("--arms", nargs="+", choices=(FULL, *RANKS), default=(FULL, *RANKS))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--scale", type=float, default=0.25, help="of CompAct's updates (default: the paper's 0.25)")
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    for folder in (args.out, args.work):
        folder.mkdir(parents=True, exist_ok=True)
    setting, file = {"steps": args.steps, "scale": args.scale, "model": MODEL}, args.work / "setting.json"
    if file.exists() and json.loads(file.read_text()) != setting:
        sys.exit(f"{args.work} holds runs of another setting ({file.read_text().strip()}); choose another --work")
    file.write_text(json.dumps(setting) + "\n")
    memory = [measure_memory(name, args.work) for name in STRATEGIES]
    runs: list[dict[str, Any]] = []
    with ThreadPoolExecutor(args.processes) as pool:
        chosen = [(arm, seed) for seed in range(args.seeds) for arm in args.arms]
        jobs = [pool.submit(train, *one, args.work, args.steps, args.scale) for one in chosen]
        for job in as_completed(jobs):
            runs.append(job.result())
            print(f"{len(runs)} of {len(jobs)}: {runs[-1]['arm']}, seed {runs[-1]['seed']}", flush=True)
    report(args.out, sorted(runs, key=lambda run: run["seed"]), memory, setting)


if __name__ == "__main__":
    main()
