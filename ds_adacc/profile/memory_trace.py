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
    runs a profiler of its own on this thread, since a thread can have only one (Rule 6), or if the trace began inside a
    backward. After each step of a backward torch puts back the profiler that the thread had before: one that begins or
    ends there would be lost, or come back.
    """

    def __init__(self, device: torch.device) -> None:
        self._bytes = "cuda_memory_usage" if device.type == "cuda" else "cpu_memory_usage"
        self._runs = False
        self._thread = 0
        self._times: list[float] = []
        self._traffic: list[int] = []
        self._levels: list[int] = []
        # Allocators round sizes up: CUDA's hands out up to 1 MiB more than it was asked for.
        self._rounding = 1 << 20 if device.type == "cuda" else 0
        self._began = 0.0
        self.peak: int | None = None
        self.left: int | None = None

    def start(self) -> None:
        self._runs, self._thread = not _profiler_enabled() and not is_in_backward(), threading.get_ident()
        if self._runs:
            _enable_profiler_legacy(_memory_only())
            torch.empty(1)  # the profiler sees this at a time that we know: so its clock is set to ours
            self._began = time.perf_counter()

    def stop(self) -> bool:
        """Stop, unless it does not run. False if it runs on: inside a backward, and on another thread."""
        if self._runs and not self._can_stop():
            return False
        if not self._runs:
            return True
        self._runs = False
        times, traffic = self._events(_disable_profiler_legacy())
        self._times, self._traffic = [0.0, *times], [0, *traffic]
        self._levels = list(accumulate(self._traffic))
        self.peak, self.left = max(self._levels), self._levels[-1]
        return True

    def _can_stop(self) -> bool:
        return self._runs and threading.get_ident() == self._thread and not is_in_backward()

    def growth(self, begin: float, end: float) -> int | None:
        """The most bytes above the level at `begin` until `end`, of `time.perf_counter`; None without a trace."""
        if not self._levels:
            return None
        first, last = (bisect_right(self._times, moment - self._began) for moment in (begin, end))
        level = self._levels[max(first - 1, 0)]
        return max([level, *self._levels[first:last]]) - level

    def transient(self, begin: float, end: float, results: Sequence[int]) -> int | None:
        """As `growth`, without the memory that is allocated after `begin` and outlives `end`, which is not the work's.

        DeepSpeed takes its buckets so, and fetches the parameters of later blocks. `results` are the sizes of what
        the work itself leaves behind; of each, the last allocation of that size counts.
        """
        if not self._levels:
            return None
        first, last = (bisect_right(self._times, moment - self._began) for moment in (begin, end))
        traffic = self._traffic[first:last]
        left = _outliving(traffic)
        for size in results:
            fitting = [place for place in sorted(left) if size <= traffic[place] <= size + self._rounding]
            left -= set(fitting[-1:])
        return max(accumulate((0 if n in left else nbytes for n, nbytes in enumerate(traffic)), initial=0))

    def __del__(self) -> None:
        # A trace that was never stopped must not keep the program from a profiler of its own.
        if self._can_stop():
            _disable_profiler_legacy()

    def __enter__(self) -> MemoryTrace:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _events(self, threads: Sequence[Sequence[Any]]) -> tuple[list[float], list[int]]:
        """Seconds since `_began` and signed bytes of each allocation and release, in order of time."""
        # The start may be in any thread's list.
        start = next(event for event in chain(*threads) if event.name() == "__start_profile")
        events = sorted(chain(*threads), key=start.cpu_elapsed_us)
        _, set_at, *memory = (event for event in events if event.kind() == "memory_alloc")
        return [set_at.cpu_elapsed_us(event) / 1e6 for event in memory], [getattr(e, self._bytes)() for e in memory]


def is_in_backward() -> bool:
    """Whether autograd runs a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


def _outliving(traffic: Sequence[int]) -> set[int]:
    """The places of allocations after which no release of that size follows. A release is of the latest of its size."""
    alive: dict[int, list[int]] = {}
    for place, nbytes in enumerate(traffic):
        if nbytes > 0:
            alive.setdefault(nbytes, []).append(place)
        elif alive.get(-nbytes):
            alive[-nbytes].pop()
    return {place for places in alive.values() for place in places}


def _memory_only() -> ProfilerConfig:
    """A profiler that records no shapes, stacks, operations or modules."""
    nothing = torch._C._profiler._ExperimentalConfig()
    return ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, nothing)
