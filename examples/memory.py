"""What a training step adds to memory, measured from outside: no cooperation of the code under test."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

import torch


class PeakMemory:
    """The peak of memory in use above the level at `start()`, in bytes.

    On CUDA it is what PyTorch's allocator hands out; on the CPU it is the resident memory of the whole
    process, as the Linux kernel counts it. Elsewhere `start()` raises OSError.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.level = 0

    def start(self) -> None:
        """Take the present use as the level, and forget any earlier peak."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.level = torch.cuda.memory_allocated(self.device)
        else:
            _return_free_heap()
            # Code 5 resets the process's high-water mark (man 5 proc).
            Path("/proc/self/clear_refs").write_text("5")
            self.level = _resident_bytes("VmRSS")

    def peak_bytes(self) -> int:
        """The highest use since `start()`, less the level."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.level
        return _resident_bytes("VmHWM") - self.level


def _return_free_heap() -> None:
    """Give freed heap memory back to the system, so that it does not count as in use (a glibc function)."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _resident_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"^{field}:\s*(\d+) kB$", status, re.MULTILINE)[1]) * 1024
