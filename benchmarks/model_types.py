"""Train a small model of every type of transformers, and some of diffusers, and compare gradients with plain autograd.

    python benchmarks/model_types.py --out benchmarks/results
    python benchmarks/model_types.py --out FOLDER --kinds causal --types qwen3_next,deepseek_v4

Codecs are lossless, and the budget is 0.6. Each model takes 12 steps on texts of 7 lengths, with dropout; models of
images and of diffusers on batches of 4 sizes, those of speech on sounds of 7 lengths. Every parameter's gradient is
compared with that of the same step without ds_adacc, bit for bit. Each type runs in a process of its own of one thread,
so that one that fails or takes too long stops no other. A type counts as not tried if its small model does not train
without ds_adacc: these sizes do not suit every type.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import multiprocessing
import random
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from markdown_table import markdown_table
from origin import as_list, origin
from small_models import KINDS, batch_of, loss_of, model_of, types_of

from ds_adacc.config import load
from ds_adacc.engine.adacc import Adacc
from ds_adacc.environment import installed
from ds_adacc.planner import InfeasibleBudget
from ds_adacc.runtime.find_blocks import find_blocks
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.runtime.wrap import wrap_blocks

SECTION = {"memory_budget": 0.6, "codecs": "none"}
LENGTHS = (16, 24, 16, 20, 16, 28, 24, 36, 16, 32, 20, 40)

IDENTICAL, OTHER, REFUSED, FAILED, NO_BLOCKS, NOT_TRIED, LATE = (
    "bit-identical",
    "other gradients",
    "budget refused",
    "failed",
    "no blocks found",
    "not tried",
    "out of time",
)


def train(kind: str, name: str) -> Mapping[str, Any]:
    """The outcome of one model type, and why."""
    torch.manual_seed(0)
    try:
        plain = model_of(kind, name)
        model = copy.deepcopy(plain)
        if gradients(plain, kind, name, 0) != gradients(plain, kind, name, 0):
            return {"outcome": NOT_TRIED, "why": "without ds_adacc, the same step gives other gradients each time"}
    except Exception as error:  # whatever transformers raises for these sizes
        return {"outcome": NOT_TRIED, "why": _short(error)}
    runtime = Runtime(load({"adacc": SECTION}), has_engine=True)
    try:
        blocks = find_blocks(model, "auto")
    except ValueError as error:
        return {"outcome": NO_BLOCKS, "why": _short(error)}
    if not blocks:
        return {"outcome": NO_BLOCKS, "why": "no two modules of one class follow each other"}
    wrap_blocks(blocks, runtime)
    adacc = Adacc(runtime, blocks)
    held = []
    for step in range(len(LENGTHS)):
        expected = gradients(plain, kind, name, step)
        try:
            found = gradients(model, kind, name, step)
            adacc.end_step()
        except InfeasibleBudget as error:
            return {"outcome": REFUSED, "why": _short(error)}
        except Exception as error:
            return {"outcome": FAILED, "why": f"step {step + 1}: {_short(error)}"}
        if found != expected:
            return {"outcome": OTHER, "why": f"step {step + 1}"}
        observation = runtime.controller.observation
        if observation is not None and observation.held is not None:
            held.append(observation.held.observed / observation.held.planned if observation.held.planned else 1.0)
    variants = [variant for _, variant in runtime.blocks.variants()]
    return {
        "outcome": IDENTICAL,
        "blocks": len(blocks),
        "recordings": runtime.recordings,
        "replays": sum(bool(variant.bound and variant.bound.segments) for variant in variants),
        "held": [min(held, default=None), max(held, default=None)],
    }


def gradients(model: nn.Module, kind: str, name: str, step: int) -> dict[str, Bits]:
    """By parameter, the gradient of one step."""
    model.zero_grad()
    torch.manual_seed(step)
    random.seed(step)
    numpy.random.seed(step)  # by which speech models mask what they hear
    loss_of(model(**batch_of(kind, name, LENGTHS[step], step))).backward()
    return {name: Bits(p.grad) for name, p in model.named_parameters() if p.grad is not None}


class Bits:
    """A gradient that is equal to those of the same bits."""

    def __init__(self, tensor: Tensor) -> None:
        self._bytes = tensor.contiguous().view(torch.uint8)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bits) and torch.equal(self._bytes, other._bytes)

    __hash__ = None  # type: ignore[assignment]


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def run(kind: str, name: str, seconds: float) -> Mapping[str, Any]:
    """The row of one model type, trained in a process of its own."""
    began = time.monotonic()
    context = multiprocessing.get_context("fork")  # which has imported everything
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(sender, kind, name))
    process.start()
    sender.close()
    try:
        row = receiver.recv() if receiver.poll(seconds) else {"outcome": LATE, "why": f"more than {seconds:.0f} s"}
    except EOFError:
        process.join()
        row = {"outcome": FAILED, "why": f"its process ended with exit code {process.exitcode}"}
    process.kill()
    process.join()
    row = {"kind": kind, "type": name, **row, "seconds": round(time.monotonic() - began, 1)}
    print(kind, name, row["outcome"], row.get("why", ""), flush=True)
    return row


def _tell(sender: Connection, kind: str, name: str) -> None:
    torch.set_num_threads(1)
    sender.send(train(kind, name))


def table(rows: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """How many types of each kind had which outcome, and the types with all but the best one."""
    outcomes = IDENTICAL, OTHER, FAILED, REFUSED, NO_BLOCKS, LATE, NOT_TRIED
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        counts[row["kind"]][row["outcome"]] += 1
    lines = ([kind, found.total(), *(found[outcome] for outcome in outcomes)] for kind, found in counts.items())
    yield markdown_table(["kind", "types", *outcomes], lines)
    for outcome in outcomes:
        found = [row for row in rows if row["outcome"] == outcome]
        if found and outcome == IDENTICAL:
            yield f"\n{outcome}: " + ", ".join(f"{row['type']}" for row in found) + "."
        elif found:
            yield f"\n{outcome}:\n"
            yield from (f"* {row['kind']} {row['type']}: {row['why']}" for row in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where model-types.json and .md go")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--types", default="", help="only these model types")
    parser.add_argument("--seconds", type=float, default=120.0, help="the most for one type")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    chosen = set(filter(None, arguments.types.split(",")))
    pairs = [(kind, name) for kind in arguments.kinds.split(",") for name in types_of(kind)]
    pairs = [(kind, name) for kind, name in pairs if not chosen or name in chosen]
    with ThreadPoolExecutor(arguments.processes) as pool:
        rows = list(pool.map(lambda pair: run(*pair, arguments.seconds), pairs))
    arguments.out.mkdir(parents=True, exist_ok=True)
    versions = {package: installed(package) for package in ("transformers", "diffusers")}
    about = origin("CPU, one thread for each type") | versions
    document = {"about": about, "lengths": LENGTHS, "section": SECTION, "rows": rows}
    (arguments.out / "model-types.json").write_text(json.dumps(document, indent=1) + "\n")
    (arguments.out / "model-types.md").write_text("\n".join([as_list(about), "", *table(rows)]) + "\n")


if __name__ == "__main__":
    main()
