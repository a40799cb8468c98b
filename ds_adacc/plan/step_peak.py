"""The peak of memory in the first step, without what recording and measuring take, and what is there before the step.

Torch counts one peak of a CUDA device for the whole process: loading a model, recording its blocks and measuring codecs
may all have raised it, and none of that comes again. So it is counted anew when the first block runs, and after each
recording. Of the CPU only the process's resident memory is known, whose peak cannot be counted anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn


class StepPeak:
    """Counts from the first `aside` on. Resets torch's statistics of peaks, so it is for a budget of "auto" alone."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}  # bytes by type of device
        self._most: int | None = None

    def begin_with(self, module: nn.Module) -> None:
        """Begin when the module is called next, with gradients."""

        def begin(*_: Any) -> None:
            if torch.is_grad_enabled():
                handle.remove()
                self.begin()

        handle = module.register_forward_pre_hook(begin)

    def begin(self) -> None:
        """Note what is there before the first step; later calls do nothing.

        The first `aside` does so, too. By then, layers before the first block have saved tensors already.
        """
        if not self._before:
            self._before = {"cpu": resident()[0]}
            if torch.cuda.is_initialized():
                self._before["cuda"] = torch.cuda.memory_allocated()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is allocated here is not the step's."""
        self.begin()
        if not torch.cuda.is_initialized():
            yield
            return
        # The first time, what has been allocated so far came before training.
        self._most = torch.cuda.memory_allocated() if self._most is None else self.most()
        try:
            yield
        finally:
            torch.cuda.reset_peak_memory_stats()

    def most(self, device: torch.device | None = None) -> int:
        """The most bytes allocated at once on the CUDA device so far."""
        return max(self._most or 0, torch.cuda.max_memory_allocated(device))

    def beyond(self, device: torch.device) -> int:
        """How many bytes the next steps will need at their peak beside what is allocated now.

        An optimizer allocates its states at the end of the first step, after the peak. They are there at the peak of
        the next steps. So the peak is compared with what was there before the step, not with what is there now.
        """
        if device.type == "cuda":
            now, most = torch.cuda.memory_allocated(device), self.most(device)
        else:
            now, most = resident()
        return max(most - min(now, self._before.get(device.type, now)), 0)


def resident(status: Path = Path("/proc/self/status")) -> tuple[int, int]:
    """Resident bytes of this process, now and at most so far. Both are 0 if the system does not report them."""
    lines = status.read_text().splitlines() if status.exists() else []
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    now, most = (int(fields.get(name, "0").split()[0]) << 10 for name in ("VmRSS", "VmHWM"))
    return now, max(now, most)
