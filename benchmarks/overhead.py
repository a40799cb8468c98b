"""Microseconds that the hooks cost per saved tensor, beside hooks that do nothing but detach.

    python benchmarks/overhead.py

On one thread, with a block so small that the hooks are all that matters; the least of many runs. What is replayed
counts in backward.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

import zoo
from recorded import record

from ds_adacc.config import load
from ds_adacc.runtime.runtime import Runtime

ROUNDS, CALLS = 10, 60


def bare(block):
    def run(*args):
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor):
            return block(*args)

    return run


def checkpointed(block, args, budget):
    """The block under a plan for this budget, past its first steps."""
    section = {"memory_budget": budget, "codecs": "none", "solver": {"max_seconds": 10.0}}
    runtime = Runtime(load({"adacc": section}))
    for _ in range(4):
        runtime.checkpoint(block, *args).sum().backward()
    return lambda *args: runtime.checkpoint(block, *args)


def microseconds(run, args):
    """(forward, backward) of one call."""
    forward = backward = 0.0
    for _ in range(CALLS):
        started = time.process_time()
        loss = run(*args).sum()
        between = time.process_time()
        loss.backward()
        forward += between - started
        backward += time.process_time() - between
    return 1e6 * forward / CALLS, 1e6 * backward / CALLS


def main():
    torch.set_num_threads(1)
    block, args, kwargs = zoo.example("gpt", 1, 4)
    recording = record(block, args, kwargs)
    ways = {
        "plain autograd": block,
        "hooks that only detach": bare(block),
        "ds_adacc, budget 1.0": checkpointed(block, args, 1.0),
        "ds_adacc, budget 0.85": checkpointed(block, args, 0.85),
        "torch.utils.checkpoint": lambda *args: checkpoint(block, *args, use_reentrant=False),
    }
    seen = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, run in ways.items():
            seen[name].append(microseconds(run, args))
    best = {name: [min(column) for column in zip(*rows, strict=True)] for name, rows in seen.items()}
    count = len(recording.positions)
    print(f"{count} saved tensors; microseconds per saved tensor above plain autograd")
    for name, (forward, backward) in best.items():
        base = best["plain autograd"]
        print(f"{name:28} forward {(forward - base[0]) / count:7.2f}   backward {(backward - base[1]) / count:7.2f}")


if __name__ == "__main__":
    main()
