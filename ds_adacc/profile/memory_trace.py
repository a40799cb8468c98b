"""What the allocators hand out and take back, seen through torch's profiler: exact, and no statistics are reset."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from heapq import merge
from itertools import accumulate, count
from typing import Any

import torch
from torch.autograd import (
    ProfilerConfig,
    ProfilerState,
    _disable_profiler_legacy,
    _enable_profiler_legacy,
    _profiler_enabled,
    _record_function_with_args_enter,
    _record_function_with_args_exit,
)

from ds_adacc.program.signature import is_in_backward

_MARK = "ds_adacc memory mark "


class MemoryTrace:
    """What is allocated and freed on `device` from `start` to `stop`, or in a `with` block.

    Backward's threads count too; gloo's do not.

    `mark` notes a moment, as an event among the others. The profiler's clock follows the time of day, which may be set
    or slowed down: moments of another clock would lie elsewhere among its events.

    `peak`: the most bytes above the level at the start; `left`: bytes above it at the end. Both are None if the program
    runs a profiler of its own on this thread, since a thread can have only one (Rule P6), or if the trace began inside
    a backward. After each step of a backward torch puts back the profiler that the thread had before: one that begins
    or ends there would be lost, or come back.
    """

    def __init__(self, device: torch.device) -> None:
        self._bytes = "cuda_memory_usage" if device.type == "cuda" else "cpu_memory_usage"
        self._runs = False
        self._thread = 0
        self._marks: dict[int, int] = {}  # by number: how many entries of the traffic are from before it
        self._numbers = count(1)
        self._traffic: list[int] = []
        self._kept: list[tuple[int, int]] = []  # as told by `keep`
        # Allocators round sizes up: CUDA's hands out up to 1 MiB more than it was asked for.
        self._rounding = 1 << 20 if device.type == "cuda" else 0
        self.peak: int | None = None
        self.left: int | None = None

    def start(self) -> None:
        self._runs, self._thread = not _profiler_enabled() and not is_in_backward(), threading.get_ident()
        if self._runs:
            _enable_profiler_legacy(_memory_only())

    def mark(self) -> int:
        """Note this moment, and return its number; 0 if the trace does not run.

        On a thread that the trace does not see, nothing is noted.
        """
        if not self._runs:  # a profiler of the program's own would show it
            return 0
        number = next(self._numbers)  # unlike a sum, the same for no two threads
        _record_function_with_args_exit(_record_function_with_args_enter(f"{_MARK}{number}"))
        return number

    def keep(self, mark: int, nbytes: int) -> None:
        """Note that memory of this size is somebody else's from the mark on, and stays.

        `transient` then counts it as freed. This is for a gradient that becomes a parameter's `.grad`.
        """
        self._kept.append((mark, nbytes))

    def stop(self) -> bool:
        """Stop, unless it does not run. False if it runs on: inside a backward, or on another thread."""
        if self._runs and not self._can_stop():
            return False
        if not self._runs:
            return True
        self._runs = False
        self._read(_disable_profiler_legacy())
        self.peak, self.left = max(accumulate(self._traffic, initial=0)), sum(self._traffic)
        return True

    def _can_stop(self) -> bool:
        return self._runs and threading.get_ident() == self._thread and not is_in_backward()

    def growth(self, begin: int, end: int) -> int | None:
        """The most bytes above the level at the mark `begin` until the mark `end`; None if one was not noted."""
        between = self._between(begin, end)
        return None if between is None else max(accumulate(between, initial=0))

    def transient(self, begin: int, end: int, results: Sequence[int]) -> int | None:
        """As `growth`, without the memory that is allocated after `begin` and outlives `end`, which is not the work's.

        DeepSpeed takes its buckets so, and fetches the parameters of later blocks. `results` are the sizes of what
        the work itself leaves behind; of each, the last allocation of that size counts. What was told to
        `keep` counts until its mark.
        """
        between = self._between(begin, end)
        if between is None:
            return None
        between = self._with_kept(between, self._marks[begin])
        left = _outliving(between)
        for size in results:
            fitting = [place for place in sorted(left) if size <= between[place] <= size + self._rounding]
            left -= set(fitting[-1:])
        return max(accumulate((0 if n in left else nbytes for n, nbytes in enumerate(between)), initial=0))

    def _between(self, begin: int, end: int) -> Sequence[int] | None:
        """What was allocated and freed between two marks; None if one was not noted."""
        if begin not in self._marks or end not in self._marks:
            return None
        return self._traffic[self._marks[begin] : self._marks[end]]

    def _with_kept(self, between: Sequence[int], first: int) -> list[int]:
        """`between`, which begins with entry `first` of the traffic, with a release of all that was kept meanwhile.

        A release is as large as the allocation that fits best.
        """
        released: dict[int, list[int]] = {}
        for mark, nbytes in self._kept:
            until = self._marks.get(mark, 0) - first
            if 0 < until <= len(between):
                fitting = [n for n in between[:until] if nbytes <= n <= nbytes + self._rounding]
                released.setdefault(until, []).extend([-min(fitting)] if fitting else [])
        told: list[int] = []
        for place in range(len(between) + 1):
            told += (*released.get(place, ()), *between[place : place + 1])
        return told

    def __del__(self) -> None:
        # A trace that was never stopped must not keep the program from a profiler of its own.
        if self._can_stop():
            _disable_profiler_legacy()

    def __enter__(self) -> MemoryTrace:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _read(self, threads: Sequence[Sequence[Any]]) -> None:
        """Take the allocations, releases and marks from what the profiler tells of each thread."""
        # The start may be in any thread's list. Events of one thread stay in their order, whatever its clock did.
        start = next(event for events in threads for event in events if event.name() == "__start_profile")
        for event in merge(*filter(_is_of_the_program, threads), key=start.cpu_elapsed_us):
            if event.kind() == "memory_alloc":
                self._traffic.append(getattr(event, self._bytes)())
            elif event.kind() == "push" and event.name().startswith(_MARK):
                self._marks[int(event.name().removeprefix(_MARK))] = len(self._traffic)


def _is_of_the_program(events: Sequence[Any]) -> bool:
    """Whether these are the events of a thread that runs the program, and not gloo's collectives.

    A collective's buffers do not belong to what is measured. They come and go at any moment of what runs meanwhile.
    """
    return not (events and events[0].name().startswith("gloo:"))


def _outliving(traffic: Sequence[int]) -> set[int]:
    """The places of allocations that are not released. A release counts as that of the latest of its size."""
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
