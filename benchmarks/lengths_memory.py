"""Resident memory while the length of the batches varies: does it stay flat, and each step's peak within the budget?

    python benchmarks/lengths_memory.py --out benchmarks/results

Six LLaMA blocks train on batches of 10, 30 or 200 lengths in turn, each in two processes of its own: plainly, and
under ds_adacc. Memory between steps is the process's resident memory; a step's peak is above the level before it.
Freed memory is given back at once. Gradients exist before the first step.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import varying
from markdown_table import markdown_table
from memory import PeakMemory
from origin import origin
from processes import EXACT_MALLOC, alone

from ds_adacc.config import load
from ds_adacc.engine.adacc import Adacc
from ds_adacc.runtime.find_blocks import find_blocks
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.runtime.wrap import wrap_blocks

BUDGET = 0.5  # of the largest peak without checkpointing
SETTLED = 100  # steps before memory has to be flat
MIB = 1 << 20


@dataclass(frozen=True)
class Run:
    """Resident bytes before each step, each step's peak above that, and the budget then (None before a plan)."""

    levels: list[int]
    peaks: list[int]
    budgets: list[int | None]

    @property
    def slope(self) -> float:
        """Bytes a step by which memory grows once it has settled: the slope of a line through it."""
        levels = self.levels[SETTLED:]
        return statistics.linear_regression(range(len(levels)), levels).slope

    @property
    def worst(self) -> float:
        """The largest peak of a step, as a share of that step's budget."""
        return max(peak / budget for peak, budget in zip(self.peaks, self.budgets, strict=True) if budget)


@dataclass(frozen=True)
class Row:
    """One number of lengths; `about`: where the figures come from."""

    lengths: int
    plain: Run
    ours: Run
    about: Mapping[str, str]


def train(lengths: int, steps: int, is_plain: bool) -> Run:
    """In a process of its own."""
    torch.manual_seed(0)
    program = varying.llama(lengths, width=128)
    runtime = Runtime(load({"adacc": {"memory_budget": BUDGET, "codecs": "none"}}), has_engine=True)
    blocks = find_blocks(program.model, "auto")
    adacc = Adacc(runtime, blocks)
    for parameter in program.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if not is_plain:
        wrap_blocks(blocks, runtime)
    run, memory = Run([], [], []), PeakMemory(torch.device("cpu"))
    for length in islice(program.sizes, steps):
        batch = program.batch(length)
        program.model.zero_grad(set_to_none=False)
        memory.start()
        program.model(**batch).backward()
        run.peaks.append(memory.peak_bytes())
        run.levels.append(memory.level)
        run.budgets.append(runtime.agreement.budget.limit)  # a fraction's grows with the largest batch so far
        del batch
        adacc.end_step()
    return run


def in_a_process(lengths: int, steps: int, way: str) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "part.json"
        part = ["--part", way, "--lengths", str(lengths), "--steps", str(steps), "--result", str(result)]
        return Run(**alone(__file__, part, EXACT_MALLOC, result))


def table(rows: Iterable[Row]) -> str:
    """The rows for people."""
    header = ["lengths", "steps", "plain, MiB", "ds_adacc, MiB", "plain, KiB a step", "ds_adacc, KiB a step"]
    lines = []
    for row in rows:
        runs = row.plain, row.ours
        levels = (f"{run.levels[SETTLED] / MIB:.1f} to {run.levels[-1] / MIB:.1f}" for run in runs)
        slopes = (f"{run.slope / 1024:.1f}" for run in runs)
        lines.append([row.lengths, len(row.ours.levels), *levels, *slopes, f"{row.ours.worst:.2f}"])
    return markdown_table([*header, "peak / budget"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/lengths"), help="a folder for lengths-memory.md and .json"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[10, 30, 200])
    parser.add_argument("--steps", type=int, default=400)
    for option, kind in (("part", str), ("result", Path)):
        parser.add_argument(f"--{option}", type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.getLogger("ds_adacc").setLevel(logging.WARNING)
    if args.part:
        args.result.write_text(json.dumps(asdict(train(args.lengths[0], args.steps, args.part == "plain"))))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for lengths in args.lengths:
        plain, ours = (in_a_process(lengths, args.steps, way) for way in ("plain", "ours"))
        rows.append(Row(lengths, plain, ours, origin("CPU, one thread")))
        (args.out / "lengths-memory.json").write_text(json.dumps([asdict(row) for row in rows]) + "\n")
        told = "\n".join(f"- {row.lengths} lengths: {', '.join(row.about.values())}" for row in rows)
        (args.out / "lengths-memory.md").write_text(f"{table(rows)}\n\n{told}\n")
    print(table(rows))


if __name__ == "__main__":
    main()
