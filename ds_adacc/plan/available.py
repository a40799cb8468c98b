"""How many bytes of memory are left for activations on this machine, for a budget of "auto"."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from ds_adacc.plan.step_peak import StepPeak

_MARGIN = 0.05


def available_bytes(device: torch.device, recomputed: int, peak: StepPeak) -> int:
    """Bytes that activations can take at the peak of a step, less a margin of 5 % of the device's memory.

        free now - what the peak of a step needs beside that (`StepPeak.beyond`) + `recomputed`

    `recomputed` is the predicted part of that peak that the blocks take: before the first policy, blocks recompute all
    they can. So the formula still counts the rest of the peak (gradients, logits, buckets). On CUDA the allocator's
    cache counts as free. The ranks on a machine share the CPU's memory evenly.
    """
    beyond = peak.beyond(device)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return max(int(free - beyond + recomputed - _MARGIN * total), 0)
    memory = psutil.virtual_memory()
    free = min([memory.available, *_left_in_cgroups()])
    return max(int((free - _MARGIN * memory.total) / _ranks_here()) - beyond + recomputed, 0)


def _ranks_here() -> int:
    """The number of ranks on this machine, from the variable that torchrun or DeepSpeed's launcher sets."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)


def _left_in_cgroups(own: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """Bytes left in each memory cgroup (version 2 or 1) of this process that has a limit."""
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, limit, used = mount, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, used = mount / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        parts = Path(path.strip("/")).parts
        for depth in range(len(parts) + 1):
            yield from _left(root.joinpath(*parts[:depth]), limit, used)


def _left(folder: Path, limit: str, used: str) -> Iterator[int]:
    """Bytes left in one cgroup. File cache that the kernel can drop at once counts as free."""
    if (folder / limit).exists() and (most := (folder / limit).read_text().strip()) != "max":
        stat_file = folder / "memory.stat"
        stat = dict(line.split() for line in stat_file.read_text().splitlines()) if stat_file.exists() else {}
        cache = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
        yield max(int(most) - int((folder / used).read_text()) + cache, 0)
