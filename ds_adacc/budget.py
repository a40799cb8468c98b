"""What the blocks' activations may take on this device."""

from __future__ import annotations

import os
from collections.abc import Sequence

import psutil
import torch

from ds_adacc import planner
from ds_adacc.config import MemoryBudget

_MARGIN = 0.05


def available_bytes(device: torch.device) -> int:
    """Bytes that activations can still take beside what is allocated now, less a margin of 5 % of the device.

    On CUDA what the allocator has cached counts as free; on the CPU the machine's available memory is shared evenly by
    the ranks on it.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return max(int(free + cached - _MARGIN * total), 0)
    memory = psutil.virtual_memory()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(int((memory.available - _MARGIN * memory.total) / ranks), 0)


def budget_bytes(budget: MemoryBudget, kinds: Sequence[planner.Kind], available: int) -> int:
    """The budget in bytes: as given, as a fraction of the peak without checkpointing, or what is available."""
    if budget.kind == "bytes":
        return int(budget.amount)
    if budget.kind == "fraction":
        return int(budget.amount * peak_without(kinds))
    return available


def peak_without(kinds: Sequence[planner.Kind]) -> int:
    """Peak bytes of the blocks' activations without checkpointing."""
    return planner.peak_bytes(kinds, [planner.retain_policy(kind.profile) for kind in kinds])
