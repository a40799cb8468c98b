"""What the allocators hand out and take back, seen through torch's profiler: exact, and no statistics are reset."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch.autograd import (
    ProfilerConfig,
    ProfilerState,
    _disable_profiler_legacy,
    _enable_profiler_legacy,
    _profiler_enabled,
)


class MemoryTrace:
    """What is allocated and freed on `device` from `start` to `stop`, or in a `with` block, by backward's threads too.

    `peak`: the most bytes above the level at the start; `left`: bytes above it at the end. Both are None if the program
    runs a profiler of its own, since a process can have only one (Rule 6).
    """

    def __init__(self, device: torch.device) -> None:
        self._bytes = "cuda_memory_usage" if device.type == "cuda" else "cpu_memory_usage"
        self._runs = False
        self._thread = 0
        self._times: list[float] = []
        self._levels: list[int] = []
        self._began = 0.0
        self.peak: int | None = None
        self.left: int | None = None

    def start(self) -> None:
        self._runs, self._thread = not _profiler_enabled(), threading.get_ident()
        if self._runs:
            _enable_profiler_legacy(_memory_only())
            torch.empty(1)  # the profiler sees this at a time that we know: so its clock is set to ours
            self._began = time.perf_counter()

    def stop(self) -> None:
        if not self._runs:
            return
        self._runs = False
        times, traffic = self._traffic(_disable_profiler_legacy())
        self._times = [0.0, *times]
        self._levels = [0, *accumulate(traffic)]
        self.peak, self.left = max(self._levels), self._levels[-1]

    def growth(self, begin: float, end: float) -> int | None:
        """The most bytes above the level at `begin` until `end`, of `time.perf_counter`; None without a trace."""
        if not self._levels:
            return None
        first, last = (bisect_right(self._times, moment - self._began) for moment in (begin, end))
        level = self._levels[max(first - 1, 0)]
        return max([level, *self._levels[first:last]]) - level

    def __del__(self) -> None:
        # A trace that was never stopped must not keep the program from a profiler of its own.
        if self._runs and threading.get_ident() == self._thread:
            _disable_profiler_legacy()

    def __enter__(self) -> MemoryTrace:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _traffic(self, threads: Sequence[Sequence[Any]]) -> tuple[list[float], list[int]]:
        """Seconds since `_began` and signed bytes of each allocation and release, in order of time."""
        # The start may be in any thread's list.
        start = next(event for event in chain(*threads) if event.name() == "__start_profile")
        events = sorted(chain(*threads), key=start.cpu_elapsed_us)
        _, set_at, *memory = (event for event in events if event.kind() == "memory_alloc")
        return [set_at.cpu_elapsed_us(event) / 1e6 for event in memory], [getattr(e, self._bytes)() for e in memory]


def _memory_only() -> ProfilerConfig:
    """A profiler that records no shapes, stacks, operations or modules."""
    nothing = torch._C._profiler._ExperimentalConfig()
    return ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, nothing)
