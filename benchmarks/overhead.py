"""Microseconds that the hooks cost: for each saved tensor of a GPT block, and for a call of a LLaMA block.

    python benchmarks/overhead.py

In CPU time on one thread, with blocks so small that the hooks are all that matters; the least of many runs, which
alternate. Beside it stand hooks that do nothing but detach. What is replayed counts in backward.

The LLaMA block's plan is one for a GPU: matmuls' inputs and attention's tensors are compressed, what lies between is
replayed. Its codecs are stubs that cost one tensor, and the operators that are replayed are measured by themselves.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

import zoo
from recorded import profile_of, record

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.execute.bound_policy import bind
from ds_adacc.kernels import Codec
from ds_adacc.program.replay import replay
from ds_adacc.runtime.runtime import Runtime

ROUNDS, CALLS = 10, 60
COMPRESSED = ("linear", "gelu", "query", "key", "value", "attention", "block_input")


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


class Stub(Codec):
    """Gives back what it was given: the Python around a codec is all that it costs."""

    form, lossless, dtypes = "stub", True, (torch.float32,)

    def compress(self, x):
        return (x,)

    def decompress(self, payload, shape, dtype):
        return payload[0].detach()

    def payload_bytes(self, shape, dtype):
        return 0

    workspace_bytes = _compress = _decompress = payload_bytes


def stubbed(block, args, kwargs):
    """The LLaMA block under a plan with stubs for codecs, and a function that runs what its backward replays."""
    section = {"memory_budget": "1GiB", "codecs": "none", "rectifier": {"enabled": False}}
    runtime = Runtime(load({"adacc": section}), stepped=True)
    for _ in range(4):
        runtime.checkpoint(block, *args, **kwargs).sum().backward()
        runtime.controller.end_backward()
        runtime.controller.end_step()
    (known,) = runtime.blocks.all()
    (bound,) = (record.bound for record in known.records())
    recording, profile = bound.recording, profile_of(bound.recording)
    stores = list(planner.recompute_policy(profile).stores)
    for value in recording.values:
        if value.index in recording.saved and value.role in COMPRESSED and value.owned:
            stores[value.index] = "stub"
    policy = planner.Policy(tuple(stores), planner.recompute_policy(profile).replays)
    codecs = {index: Stub() for index, store in enumerate(stores) if store == "stub"}
    bound = known.records()[0].bound = bind(recording, policy, codecs)
    looks = {value.index: value.geometry for value in recording.values}
    tensors = {
        i: torch.zeros(1).new_empty(look.span // 4).as_strided(look.size, look.stride) for i, look in looks.items()
    }

    def replays():
        for rerun in bound.replays.values():
            replay(rerun.op, tensors.__getitem__, recording.parameters)

    return lambda *given: runtime.checkpoint(block, *given, **kwargs), replays, bound


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
    of_llama()


def of_llama():
    """Microseconds that a call of a LLaMA block costs above plain autograd, codecs stubbed."""
    block, args, kwargs = zoo.example("llama", 1, 4)
    run, replays, bound = stubbed(block, args, kwargs)
    seen = {"plain": [], "ours": [], "replays": []}
    for _ in range(2 * ROUNDS):
        seen["plain"].append(microseconds(lambda *given: block(*given, **kwargs), args))
        seen["ours"].append(microseconds(run, args))
        started = time.process_time()
        for _ in range(CALLS):
            replays()
        seen["replays"].append((0.0, 1e6 * (time.process_time() - started) / CALLS))
    plain, ours, replayed = ([min(column) for column in zip(*rows, strict=True)] for rows in seen.values())
    forward, backward = (mine - base for mine, base in zip(ours, plain, strict=True))
    print(
        f"\nLLaMA block: {len(bound.instructions)} saved tensors, {len(bound.codecs)} compressed, "
        f"{len(bound.replays)} operators replayed; microseconds of a call above plain autograd"
    )
    print(f"forward {forward:7.0f}   backward {backward - replayed[1]:7.0f}, and the replays {replayed[1]:.0f}")


if __name__ == "__main__":
    main()
