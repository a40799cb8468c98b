"""Why an operator must not be replayed: it is a collective, writes in place, reads data, and the like (Rule R6).

These are the first of the checks; `record/replayable/verify.py` replays what they let pass.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ds_adacc.program.schema import is_training_batch_norm, reads_data

OPAQUE = "not a plain operator"  # no ATen operator
COLLECTIVE = "a collective"  # other ranks take part
COMPILED = "runs compiled"
IN_PLACE = "writes in place"
TAINTED = "may hold a number read from data"  # it runs after data was read (Rule R7)
UNSEEN = "writes where PyTorch does not see it"  # a kernel outside of any Function (Rule R19)
CONJUGATE = "reads a view that torch conjugates or negates only when it is read"  # its geometry does not tell
STATISTICS = "reads or updates running statistics, and writes to them are not counted"
REPLACED = "gives a tensor other memory"  # as it was in the recorded call
# As torch.nn.utils.parametrize does at each registration. It counts as a write, so no version tells of real ones.
PARAMETRIZED = "reads a parameter that is parametrized anew in each call"
MOVED = "reads a parameter that the forward gives other data"  # as by `weight.data = ...`, which nothing tells of
WRITTEN = "reads or writes a parameter to which the forward writes"  # as by `weight.data.clamp_(...)`
UNINITIALISED = "uninitialised memory"  # what an `empty` returns is not replayed by itself

OF_TORCH = ("aten", "prims")  # the namespaces of torch's own operators
_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "symm_mem")  # namespaces too
# Parts of the names of collectives that other packages define as operators.
_COLLECTIVE_WORDS = ("all_reduce", "allreduce", "all_gather", "allgather", "all_to_all", "alltoall", "reduce_scatter")


def is_of_torch(func: Any) -> bool:
    """Whether `func` is one of torch's own operators."""
    return getattr(func, "namespace", None) in OF_TORCH


def refusal_of(func: Any, args: tuple[Any, ...] = (), writes_to_fresh: bool = False) -> str | None:
    """Why a call of `func` must not be replayed (Rule R6), as far as its schema tells; verifying finds the rest.

    `args`: a batch norm that is told there to train computes with the batch's statistics alone.
    `writes_to_fresh`: what it writes to, if it was given any of that, is made anew by every replay (Rule R4).
    """
    if not isinstance(func, torch._ops.OpOverload):
        return OPAQUE
    refusal = _refusal_of(func, writes_to_fresh)
    return None if refusal == STATISTICS and is_training_batch_norm(func, args) else refusal


@functools.cache
def _refusal_of(func: torch._ops.OpOverload, writes_to_fresh: bool) -> str | None:
    if func.namespace in _COLLECTIVES:
        return COLLECTIVE
    if not is_of_torch(func) and any(word in func._schema.name for word in _COLLECTIVE_WORDS):
        return COLLECTIVE
    if func._schema.name == "aten::set_":
        return REPLACED
    if func._schema.is_mutable and not writes_to_fresh:
        return IN_PLACE
    if "batch_norm" in func._schema.name:
        return STATISTICS
    if is_of_torch(func) and "empty" in func._schema.name:
        return UNINITIALISED
    if reads_data(func):
        return "reads data into Python"
    return None
