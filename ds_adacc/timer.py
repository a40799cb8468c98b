"""How long something takes on a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

_REPEATS = 3


class Timer:
    """Seconds of a function: the least of three runs, after one to warm up. Other work on the machine only adds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, function: Callable[[], object]) -> float:
        function()
        return min(self.once(function) for _ in range(_REPEATS))

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


def device_of(tensors: Sequence[torch.Tensor]) -> torch.device:
    """The device that a block with these tensors runs on: a tensor or two may stay on the host."""
    return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))
