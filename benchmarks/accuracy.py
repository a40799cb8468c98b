"""Train a GPT with lossy codecs and exactly, from the same weights on the same batches: what do the codecs change?

    python benchmarks/accuracy.py --size small --out FOLDER
    python benchmarks/accuracy.py --size small --out FOLDER --arms none paper --injections plain --seeds 1

For each seed the model first trains exactly, once. Then one injection (injections.py) puts outliers into the tensors
that backward needs, without changing the function, and the model trains on under one arm: a choice of codecs, or
"none", which is exact. A run is one injection, one arm and one seed (accuracy_run.py). --processes of them run at once,
each on one thread. The exact arm always runs.

FOLDER/work gets the rows of each run as they come. Start the same command again after a break: finished runs are kept,
and others begin again after the exact steps. The report (accuracy.md, .json, .png, .svg) is of all finished runs there.
Size small takes about an hour on two cores; size large is for a GPU or a night.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from accuracy_report import report
from accuracy_run import ARMS, BUDGET, EXACT, Run, Setting, run, warm_up
from injections import INJECTIONS

from ds_adacc.config import load


@dataclass(frozen=True)
class Size:
    """A setting, and which runs there are by default."""

    setting: Setting
    seeds: int
    injections: tuple[str, ...]
    arms: tuple[str, ...]


SIZES = {
    "small": Size(
        Setting(exact=100, steps=200),
        2,
        ("plain", "key-40", "key-100", "all"),
        (EXACT, "quantization", "paper-unbounded", "paper", "auto"),
    ),
    "large": Size(Setting(exact=300, steps=1500), 3, tuple(INJECTIONS), tuple(ARMS)),
}


def run_all(setting: Setting, runs: list[Run], work: Path, processes: int) -> None:
    """All runs, several at once, each in a process of one thread."""
    os.environ["OMP_NUM_THREADS"] = "1"  # the processes of the pool begin with it
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=begin_process) as pool:
        seeds = sorted({one.seed for one in runs})
        follow(pool, {f"exact steps of seed {seed}": (warm_up, setting, seed, work) for seed in seeds})
        follow(pool, {f"{one.injection}, {one.arm}, seed {one.seed}": (run, setting, one, work) for one in runs})


def begin_process() -> None:
    """One thread, and no table of each plan: the report tells of them."""
    torch.set_num_threads(1)
    logging.getLogger("ds_adacc").setLevel(logging.WARNING)


def follow(pool: ProcessPoolExecutor, jobs: Mapping[str, tuple[Callable[..., None], Any, Any, Any]]) -> None:
    """Wait for the jobs, and name each when it is done. If one fails, those that have not begun never do."""
    names = {pool.submit(*job): name for name, job in jobs.items()}
    try:
        for number, future in enumerate(as_completed(names), start=1):
            future.result()
            print(f"{number} of {len(names)}: {names[future]}", flush=True)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def open_work(work: Path, setting: Setting) -> None:
    """The folder of the rows. Raises SystemExit if it holds runs of another setting."""
    work.mkdir(parents=True, exist_ok=True)
    file = work / "setting.json"
    if file.exists() and json.loads(file.read_text()) != asdict(setting):
        sys.exit(f"{work} holds runs of another setting ({file.read_text().strip()}); choose another --out")
    file.write_text(json.dumps(asdict(setting)) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the report, and the rows in its work/")
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="instead of the size's own")
    parser.add_argument("--injections", nargs="+", choices=INJECTIONS, help="instead of the size's own")
    parser.add_argument("--seeds", type=int, help="how many")
    parser.add_argument("--exact", type=int, help="exact steps before the injection")
    parser.add_argument("--steps", type=int, help="steps after it")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    size = SIZES[args.size]
    given = {key: value for key in ("exact", "steps") if (value := getattr(args, key)) is not None}
    setting, work = replace(size.setting, **given), args.out / "work"
    # The exact runs come first, and are always there: the report compares with them.
    arms = (EXACT, *(arm for arm in args.arms or size.arms if arm != EXACT))
    for arm in arms:  # a section that is wrong must not wait for the exact steps
        if ARMS[arm] is not None:
            load({"adacc": {**ARMS[arm], "memory_budget": BUDGET}})
    seeds = range(args.seeds or size.seeds)
    open_work(work, setting)
    runs = [Run(i, arm, seed) for arm in arms for i in args.injections or size.injections for seed in seeds]
    run_all(setting, runs, work, args.processes)
    report(setting, work, args.out)


if __name__ == "__main__":
    main()
