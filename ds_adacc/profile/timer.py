"""How long something takes on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_REPEATS = 3


class Timer:
    """Seconds of a function: the least of three runs, after one to warm up (Rule 2)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spreads: list[float] = []

    def __call__(self, function: Callable[[], object]) -> float:
        function()
        least, second, *_ = sorted(self.once(function) for _ in range(_REPEATS))
        self._spreads.append((second - least) / least if least else 0.0)
        return least

    @property
    def noise(self) -> float:
        """How far the second best run was above the best, as a fraction: the median of all measurements so far."""
        return statistics.median(self._spreads) if self._spreads else 0.0

    def once(self, function: Callable[[], object]) -> float:
        """Seconds of a single run."""
        if self._device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            stop.record()
            stop.synchronize()
            return start.elapsed_time(stop) / 1000
        begin = time.perf_counter()
        function()
        return time.perf_counter() - begin
