"""Two ranks under ZeRO-3 for thousands of steps: does memory stay flat, do the losses stay those of the plain run?

    python benchmarks/soak.py --out benchmarks/results

A small GPT with dropout learns Python's standard library four times, from the same weights on the same batches:
without ds_adacc, without it but with other dropout (what chance alone makes of the losses), with codecs "none" (every
loss must be the plain one, bit for bit), and with codecs "paper", the rectifier looking at least every 64 steps.
Resident memory is each rank's own, with freed memory given back at once. Drift is the mean, over the last quarter of
the steps, of a run's loss less the plain one's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from markdown_table import markdown_table
from origin import origin, publish
from processes import BINARIES, EXACT_MALLOC, free_port, run

from ds_adacc.environment import device_name

Lines = Sequence[Mapping[str, Any]]  # of one rank: what each step told
RANKS, MIB = 2, 1 << 20
EVERY, SETTLED = 20, 200  # steps between looks at the memory; steps before it has to be flat
MODEL = {"layers": 2, "width": 64, "heads": 4, "context": 64, "dropout": 0.1}
ADACC = {"memory_budget": 0.7, "rectifier": {"max_interval": 64}}
CASES: dict[str, tuple[int, dict[str, Any] | None]] = {  # by name: the seed of dropout, and the section
    "plain": (0, None),
    "other dropout": (1, None),
    "lossless": (0, {**ADACC, "codecs": "none"}),
    "paper": (0, {**ADACC, "codecs": "paper"}),
}


def ds_config(section: Mapping[str, Any] | None) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 1 << 30,
    }
    return config | ({"adacc": section} if section else {})


def work(case: str, steps: int, out: Path) -> None:
    """One rank of one run: a line of JSON for every step."""
    import deepspeed
    import torch
    from train import GPT, batches, read_texts, train_step, validate

    import ds_adacc

    seed, section = CASES[case]
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = GPT(**MODEL)
    engine, *_ = ds_adacc.initialize(model=model, model_parameters=model.parameters(), config=ds_config(section))
    training, validation = read_texts(None)
    data = batches(engine, training, MODEL["context"], seed=0)
    torch.manual_seed(1000 * seed + engine.global_rank)
    plan = None
    with (out / f"{case}.{engine.global_rank}.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            row = {"step": step, "loss": train_step(engine, data)}
            if step % EVERY == 0:
                row["resident"] = resident_bytes()
            if section and engine.adacc.runtime.controller.plan is not plan:
                plan = engine.adacc.runtime.controller.plan
                row["plan"] = {"reason": plan.reason, "held": plan.held, "peak": plan.peak}
            print(json.dumps(row), file=file, flush=True)
        loss = validate(engine, validation, MODEL["context"])
        print(json.dumps({"validation_loss": loss, "device": device_name(engine.device)}), file=file)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def launch(case: str, steps: int, out: Path) -> None:
    with free_port() as port:
        command = [f"{BINARIES}/deepspeed", "--num_gpus", str(RANKS), "--master_port", port, __file__]
        command += ["--case", case, "--steps", str(steps), "--out", str(out)]
        run(command, EXACT_MALLOC, out / f"{case}.log")


def summary(runs: Mapping[str, Sequence[Lines]]) -> dict[str, dict[str, Any]]:
    """By case, what its losses and each rank's resident bytes did."""
    plain = losses(runs["plain"][0])
    last = len(plain) // 4
    rows = {}
    for case, ranks in runs.items():
        drifts = [mine - reference for mine, reference in zip(losses(ranks[0]), plain, strict=True)]
        rows[case] = {
            "validation_loss": ranks[0][-1]["validation_loss"],
            "drift": statistics.fmean(drifts[-last:]),
            "largest_difference": max(map(abs, drifts)),
            "ranks": [memory(rank) for rank in ranks],
            "plans": [{"step": row["step"], **row["plan"]} for row in ranks[0] if "plan" in row],
        }
    return rows


def losses(rank: Lines) -> list[float]:
    return [row["loss"] for row in rank if "loss" in row]


def memory(rank: Lines) -> dict[str, Any]:
    """Bytes at the first look after `SETTLED` steps, at the last, and the slope of all between in bytes a step."""
    looks = [(row["step"], row["resident"]) for row in rank if "resident" in row and row["step"] >= SETTLED]
    steps, resident = zip(*looks, strict=True)
    slope = statistics.linear_regression(steps, resident).slope
    return {"first": resident[0], "last": resident[-1], "slope": slope, "curve": looks}


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    header = ["run", "validation loss", "drift", "largest difference", "plans", "MiB of rank 0", "KiB a step, by rank"]
    lines = []
    for case, row in rows.items():
        first = row["ranks"][0]
        ends = f"{first['first'] / MIB:.1f} to {first['last'] / MIB:.1f}"
        slopes = ", ".join(f"{rank['slope'] / 1024:.2f}" for rank in row["ranks"])
        losses = f"{row['validation_loss']:.4f}", f"{row['drift']:+.4f}", f"{row['largest_difference']:.4f}"
        lines.append([case, *losses, len(row["plans"]), ends, slopes])
    return markdown_table(header, lines)


def figure(rows: Iterable[str], runs: Mapping[str, Sequence[Lines]], folder: Path) -> None:
    """Resident memory and the loss, averaged over 50 steps, by step."""
    from matplotlib.figure import Figure

    from ds_adacc.cli import plots

    drawing = Figure(figsize=(7, 6), layout="constrained")
    above, below = drawing.subplots(2, 1, sharex=True)
    for case in rows:
        looks = [(each["step"], each["resident"] / MIB) for each in runs[case][0] if "resident" in each]
        above.plot(*zip(*looks, strict=True), label=case)
        smooth = losses(runs[case][0])
        below.plot([statistics.fmean(smooth[max(0, end - 50) : end]) for end in range(1, len(smooth) + 1)], label=case)
    above.set_ylabel("resident memory of rank 0, MiB")
    above.set_ylim(bottom=0)
    below.set_ylabel("training loss, mean of 50 steps")
    below.set_xlabel("step")
    above.legend()
    plots.save(drawing, folder, "soak")


def read(case: str, out: Path) -> list[Lines]:
    """The lines of both ranks."""
    files = [out / f"{case}.{rank}.jsonl" for rank in range(RANKS)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the table, JSON and figure")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        work(args.case, args.steps, args.out)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for case in CASES:
            launch(case, args.steps, Path(folder))
            runs[case] = read(case, Path(folder))
    rows = summary(runs)
    about = origin(f"{runs['plain'][0][-1]['device']}, {RANKS} ranks, ZeRO-3")
    print(table(rows))
    publish(args.out / "soak", about, f"{args.steps} steps\n\n{table(rows)}", steps=args.steps, runs=rows)
    figure(rows, runs, args.out)


if __name__ == "__main__":
    main()
