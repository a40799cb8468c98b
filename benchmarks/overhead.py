"""Microseconds that the hooks cost: for each saved tensor of a GPT block, and for a call of a LLaMA block.

    python benchmarks/overhead.py

In CPU time on one thread, with blocks so small that the hooks are all that matters. The ways take turns call by call;
what is told is the tenth percentile of a way's calls, above that of the plain block. Beside it stand hooks that do
nothing but detach: torch's own share of any hook.

The LLaMA blocks run one after the other, as in a model. Their plan is one for a GPU: matmuls' inputs and attention's
tensors are compressed, what lies between is replayed. Its codecs are stubs that cost one tensor. The operators that
backward replays are measured by themselves.
"""

from __future__ import annotations

import copy
import functools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

import zoo
from recorded import profile_of, record

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.execute.bound_policy import BoundPolicy, bind
from ds_adacc.execute.variant import Variant
from ds_adacc.kernels import Codec
from ds_adacc.program.replay import replay
from ds_adacc.runtime.runtime import Runtime

CALLS = 1000
BLOCKS = 8  # of the LLaMA: as in a model, what a forward and backward takes as a whole spreads over its calls
COMPRESSED = ("linear", "gelu", "query", "key", "value", "attention", "block_input")


def bare(block: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*args: Any, **kwargs: Any) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor):
            return block(*args, **kwargs)

    return run


def checkpointed(block: nn.Module, args: Sequence[Tensor], budget: float) -> Callable[..., Tensor]:
    """The block under a plan for this budget, past its first steps."""
    section = {"memory_budget": budget, "codecs": "none", "solver": {"max_seconds": 10.0}}
    runtime = Runtime(load({"adacc": section}))
    for _ in range(4):
        runtime.checkpoint(block, *args).sum().backward()
    return lambda *args: runtime.checkpoint(block, *args)


class Stub(Codec):
    """Keeps what it was given: the Python around a codec is all that it costs."""

    form, lossless, dtypes = "stub", True, (torch.float32,)

    def compress(self, x: Tensor) -> tuple[Tensor]:
        return (x.detach(),)

    def decompress(self, payload: tuple[Tensor, ...], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return payload[0].view(shape)

    def payload_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return 0

    workspace_bytes = _compress = _decompress = payload_bytes


def in_a_row(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Runs each block on what the one before it returns, as a model does."""

    def whole(blocks: Sequence[nn.Module], x: Tensor, **kwargs: Any) -> Tensor:
        for block in blocks:
            x = run(block, x, **kwargs)
        return x

    return whole


def stubbed(
    blocks: Sequence[nn.Module], args: Sequence[Tensor], kwargs: Mapping[str, Any]
) -> tuple[Runtime, list[BoundPolicy]]:
    """The runtime of LLaMA blocks under a plan with stubs for codecs, and the bound policy of each block."""
    section = {"memory_budget": "1GiB", "codecs": "none", "rectifier": {"enabled": False}}
    runtime = Runtime(load({"adacc": section}), has_engine=True)
    for _ in range(4):
        in_a_row(runtime.checkpoint)(blocks, *args, **kwargs).sum().backward()
        runtime.controller.end_backward()
        runtime.controller.end_step()
    return runtime, [under_stubs(known.variants()[0]) for known in runtime.blocks.all()]


def under_stubs(variant: Variant) -> BoundPolicy:
    """Bind the variant to the plan; returns the bound policy."""
    recording = variant.recording
    stores = list(planner.recompute_policy(profile_of(recording)).stores)
    for value in recording.values:
        if value.index in recording.saved and value.role in COMPRESSED and value.owned:
            stores[value.index] = "stub"
    codecs = {index: Stub() for index, store in enumerate(stores) if store == "stub"}
    bound = bind(recording, planner.Policy(tuple(stores)), codecs)
    variant.bind_later(lambda _: bound)
    return bound


def replays_of(bound: BoundPolicy) -> Callable[[], None]:
    """A function that runs what backward replays under this policy, on zeros."""
    recording = bound.recording
    looks = {value.index: value.geometry for value in recording.values}
    tensors = {
        i: torch.zeros(1).new_empty(look.span // 4).as_strided(look.size, look.stride) for i, look in looks.items()
    }

    def replays() -> None:
        for segment in bound.segments.values():
            for op in (*(op for op, _ in segment.before), segment.op):
                replay(op, tensors.__getitem__, recording.parameters)

    return replays


def microseconds(
    ways: Mapping[str, Callable[..., Tensor]], args: Sequence[Any], after: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """By name, (forward, backward) of one call: the tenth percentiles of many calls, in turns. `after` is not timed."""
    seen = {name: ([], []) for name in ways}
    for _ in range(CALLS):
        for name, run in ways.items():
            started = time.process_time()
            loss = run(*args).sum()
            between = time.process_time()
            loss.backward()
            seen[name][0].append(between - started)
            seen[name][1].append(time.process_time() - between)
            after()
    return {name: [1e6 * statistics.quantiles(column, n=10)[0] for column in columns] for name, columns in seen.items()}


def told(best: dict[str, list[float]], count: int = 1) -> list[float]:
    """A line for each way: what a call takes above the plain block, for each of `count` tensors."""
    plain = best.pop("plain autograd")
    for name, (forward, backward) in best.items():
        print(f"{name:28} forward {(forward - plain[0]) / count:7.2f}   backward {(backward - plain[1]) / count:7.2f}")
    return plain


def main() -> None:
    torch.set_num_threads(1)
    of_gpt()
    of_llama()


def of_gpt() -> None:
    """What each saved tensor of a GPT block costs above plain autograd, under lossless plans."""
    block, args, kwargs = zoo.example("gpt", 1, 4)
    count = len(record(block, args, kwargs).positions)
    ways = {
        "plain autograd": block,
        "hooks that only detach": bare(block),
        "ds_adacc, budget 1.0": checkpointed(block, args, 1.0),
        "ds_adacc, budget 0.85": checkpointed(block, args, 0.85),
        "torch.utils.checkpoint": lambda *args: checkpoint(block, *args, use_reentrant=False),
    }
    print(f"GPT block: {count} saved tensors; microseconds for each, above plain autograd")
    told(microseconds(ways, args), count)


def of_llama() -> None:
    """What a call of a LLaMA block costs above plain autograd, codecs stubbed."""
    block, args, kwargs = zoo.example("llama", 1, 4)
    blocks = [block, *(copy.deepcopy(block) for _ in range(BLOCKS - 1))]
    runtime, (bound, *_) = stubbed(blocks, args, kwargs)
    replayed = bound.recording.segments.replayed(bound.policy.stores)
    print(
        f"\nLLaMA block, {BLOCKS} in a row: {len(bound.course.instructions)} saved tensors, {len(bound.codecs)} values "
        f"compressed, {len(replayed)} operators replayed; microseconds of a call, above plain autograd"
    )

    def plain(block: nn.Module, *given: Tensor, **named: Any) -> Tensor:
        return block(*given, **named)

    runs = {"plain autograd": plain, "hooks that only detach": bare(plain), "ds_adacc": runtime.checkpoint}
    ways = {name: functools.partial(in_a_row(run), blocks, **kwargs) for name, run in runs.items()}
    # What follows a backward comes once for all blocks.
    forward, backward = told(microseconds(ways, args, runtime.controller.end_backward), BLOCKS)
    replays, seen = replays_of(bound), []
    for _ in range(CALLS):
        started = time.process_time()
        replays()
        seen.append(time.process_time() - started)
    print(f"{'replays, part of backward':28} {1e6 * statistics.quantiles(seen, n=10)[0]:40.2f}")
    print(f"The plain block itself takes {forward / BLOCKS:.0f} forward and {backward / BLOCKS:.0f} backward.")


if __name__ == "__main__":
    main()
