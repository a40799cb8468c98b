"""How long something takes on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

_ON_HOST, _ON_CUDA = (3, 0), (5, 2)  # how many runs, and which of them counts, from the quickest
_CYCLES = 2e9  # a second, at least on GPUs of today: at a lower clock the device only sleeps longer
_LONGEST_LEAD = 0.01  # seconds; a function that takes the host longer waits for the device itself


@contextmanager
def stopwatch(device: torch.device | None, note: Callable[[float], None]) -> Iterator[None]:
    """Tell `note` the seconds of what runs inside, also on the device. Nothing is told if it raises."""
    is_cuda = device is not None and device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    yield
    if is_cuda:
        torch.cuda.synchronize(device)
    note(time.perf_counter() - begin)


class Timer:
    """Seconds of a function with a cold cache, without those of its first run (Rule P2).

    On the CPU, other tensors are read before each run, so that they are in the caches and not what the run needs. To
    overwrite the caches would take memory, which a step that measures has not.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spreads: list[float] = []

    def __call__(self, function: Callable[[], object], others: Sequence[torch.Tensor] = ()) -> float:
        """The least of three runs; on a CUDA device the median of five. `others`: tensors that it does not need."""
        function()
        if self._device.type == "cuda":
            before, runs, place = self._head_start(function), *_ON_CUDA
        else:
            before, runs, place = partial(_read, others), *_ON_HOST
        ordered = sorted(self.once(function, before) for _ in range(runs))
        seconds, above = ordered[place : place + 2]
        self._spreads.append((above - seconds) / seconds if seconds else 0.0)
        return seconds

    @property
    def noise(self) -> float:
        """How far the next best run was above the one that counts, as a fraction: the median of all measurements."""
        return statistics.median(self._spreads) if self._spreads else 0.0

    def once(self, function: Callable[[], object], before: Callable[[], object] | None = None) -> float:
        """Seconds of a single run. `before` runs first, and does not count."""
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):  # the sleep and the events are the current device's
                return _once_on_cuda(function, before)
        if before is not None:
            before()
        begin = time.perf_counter()
        function()
        return time.perf_counter() - begin

    def _head_start(self, function: Callable[[], object]) -> Callable[[], None]:
        """What to give the device before each run, so that the run alone is timed, as it is within a step.

        The device sleeps until the host has enqueued the run: else a short kernel would be timed with the Python around
        it. Its cache is overwritten: a tensor of a real step was written long before it is read.
        """
        torch.cuda.synchronize(self._device)
        began = time.perf_counter()
        function()
        seconds = min(2 * (time.perf_counter() - began), _LONGEST_LEAD) + 1e-4
        size = 2 * torch.cuda.get_device_properties(self._device).L2_cache_size
        others = torch.empty(size, dtype=torch.uint8, device=self._device)

        def before() -> None:
            torch.cuda._sleep(int(seconds * _CYCLES))
            others.zero_()

        return before


def _once_on_cuda(function: Callable[[], object], before: Callable[[], object] | None) -> float:
    if before is not None:
        before()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1000


def _read(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.sum()
