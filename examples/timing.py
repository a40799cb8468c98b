"""How long steps take beside one another, and how far that figure can be trusted."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

PRECISION = 0.06  # the widest spread at which two decimals still say something: 0.03 to either side


@dataclass(frozen=True)
class Seconds:
    """What one step took: by the clock on the wall, and in computing.

    `computing` is the CPU time of the process; on CUDA it is the time between two events around the step. Another
    process on the same cores adds to the wall-clock time, but hardly to the CPU time. CPU time is steady with one
    thread only (OMP_NUM_THREADS=1): threads that wait for one another burn CPU time too.
    """

    wall: float
    computing: float


@dataclass(frozen=True)
class Ratio:
    """How many times the base took, over many pairs of steps: the median, and the range of the middle half."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, mine: Sequence[float], base: Sequence[float]) -> Ratio:
        """The ratio of each pair of steps, the one right after the other. At least two pairs; else ValueError."""
        ratios = [one / other for one, other in zip(mine, base, strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return cls(median, low, high)

    @property
    def is_uncertain(self) -> bool:
        """Whether the range is wider than what the median shows: its distance from 1, to the precision of 0.03."""
        return self.high - self.low > min(abs(self.median - 1), PRECISION)

    def __str__(self) -> str:
        return f"{'≈ ' if self.is_uncertain else ''}{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def take_turns(
    steps: Mapping[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[str, list[Seconds]]:
    """Run each step once in every round, in the order given. Returns what each run took, by name.

    The speed of a machine drifts. Steps of one round meet the same speed, so only these are to be compared.
    """
    taken: dict[str, list[Seconds]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            taken[name].append(seconds(step, device))
    return taken


def seconds(step: Callable[[], object], device: torch.device) -> Seconds:
    """What one run of `step` takes."""
    if device.type == "cuda":
        return _seconds_on_cuda(step, device)
    wall, computing = time.perf_counter(), time.process_time()
    step()
    return Seconds(time.perf_counter() - wall, time.process_time() - computing)


def _seconds_on_cuda(step: Callable[[], object], device: torch.device) -> Seconds:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    wall = time.perf_counter()
    start.record(torch.cuda.current_stream(device))
    step()
    stop.record(torch.cuda.current_stream(device))
    stop.synchronize()
    return Seconds(time.perf_counter() - wall, start.elapsed_time(stop) / 1000)
