"""A runtime that never plans, and so recomputes all that it may; its gradients beside those of plain autograd."""

import torch
import zoo
from recorded import profile_of

from ds_adacc.config import load
from ds_adacc.runtime.runtime import Runtime


def recomputing():
    """The runtime. It measures nothing."""
    runtime = Runtime(load({"adacc": {"memory_budget": 0.5, "codecs": "none"}}), has_engine=True)
    runtime.profiler.profile = lambda recording, captured: profile_of(recording)
    return runtime


def compare(make, steps, arguments):
    """Train a block that `make` returns, and compare all gradients. Returns the runtime.

    `arguments(block, step)` returns those of a step's call, drawn after its seed was set.
    """
    runtime, seen = recomputing(), []
    for call in (lambda block, *args: block(*args), runtime.checkpoint):
        torch.manual_seed(0)
        block = make()
        seen.append([])
        for step in range(steps):
            torch.manual_seed(step)
            args = arguments(block, step)
            seen[-1].append(zoo.gradients(block, args, {}, lambda *args, b=block, c=call: c(b, *args), seed=step))
            runtime.controller.end_backward()
    for expected, found in zip(*seen, strict=True):
        zoo.assert_same_bits(expected, found)
    assert all(variant.bound.segments for known in runtime.blocks.all() for variant in known.variants())
    return runtime
