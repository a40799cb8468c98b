"""How long steps take beside one another, and how far that figure can be trusted."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb

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
    """How many times the base took: the median of many pairs of steps, and the range that it is known to.

    The range is the 95 % confidence interval of the median, by the sign test. With fewer than six pairs it is the range
    of all.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, mine: Sequence[float], base: Sequence[float]) -> Ratio:
        """The ratio of the steps taken in the same rounds. Raises ValueError if there is none."""
        ratios = sorted(one / other for one, other in zip(mine, base, strict=True))
        outside = _outside(len(ratios))
        return cls(statistics.median(ratios), ratios[outside], ratios[-1 - outside])

    @property
    def is_uncertain(self) -> bool:
        """Whether the range is wider than what the median shows: its distance from 1, to the precision of 0.03."""
        return self.high - self.low > min(abs(self.median - 1), PRECISION)

    def __str__(self) -> str:
        return f"{'≈ ' if self.is_uncertain else ''}{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def _outside(pairs: int) -> int:
    """How many of so many sorted ratios lie below the interval; as many lie above it.

    Each ratio is below the true median with a chance of one half. So the number of those below it is the number of
    heads among as many coins.
    """

    def chance(heads: int) -> float:
        """The chance of at most so many heads, or at most so many tails."""
        return 2 * sum(comb(pairs, each) for each in range(heads + 1)) / 2**pairs

    return max((heads for heads in range(pairs // 2) if chance(heads) <= 0.05), default=0)


def in_turns(steps: Mapping[str, Callable[[], Seconds]], rounds: int) -> dict[str, list[Seconds]]:
    """What the steps took, by name. In each round all of them run once, in an order that is drawn anew.

    In a fixed order, a step would always find caches and memory as one certain other step has left them.
    """
    taken: dict[str, list[Seconds]] = {name: [] for name in steps}
    draw = random.Random(0)
    for _ in range(rounds):
        for name in draw.sample(list(steps), len(steps)):
            taken[name].append(steps[name]())
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
