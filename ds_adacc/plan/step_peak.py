"""The peak of a CUDA device's memory in a step, without what recording and measuring take of it.

Torch counts one peak for the whole process: loading a model, recording its blocks and measuring codecs may all have
raised it, and none of that comes again. So it is counted anew when the first block runs, and after each recording.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StepPeak:
    """Counts from the first `aside` on. Resets torch's statistics of peaks, so it is for a budget of "auto" alone."""

    def __init__(self) -> None:
        self._most: int | None = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is allocated here is not the step's."""
        if not torch.cuda.is_initialized():
            yield
            return
        # The first time, what has been allocated so far came before training.
        self._most = torch.cuda.memory_allocated() if self._most is None else self.bytes()
        try:
            yield
        finally:
            torch.cuda.reset_peak_memory_stats()

    def bytes(self, device: torch.device | None = None) -> int:
        """The most bytes allocated at once so far."""
        return max(self._most or 0, torch.cuda.max_memory_allocated(device))
