"""The sums of magnitudes by which outlier channels are known, and their kernels."""

import numpy as np
import torch
from torch import Tensor

from ..codec import rows_and_channels
from ..reference.scores import RUN
from .compiling import kernel
from .memory import KINDS, array_at, load
from .openmp import OPENMP

BLOCK = 2048  # elements at a time, so that they stay in the L1 cache


def channel_sums(x: Tensor) -> Tensor:
    """See `reference.channel_sums`. Raises TypeError or ValueError for another dtype, device or layout."""
    if x.dtype not in KINDS:
        raise TypeError(f"channels of {x.dtype} cannot be ranked; valid: {', '.join(map(str, KINDS))}")
    if x.device.type != "cpu" or not x.is_contiguous():
        raise ValueError(f"ranking takes contiguous tensors on the CPU; got strides {x.stride()} on {x.device}")
    rows, channels = rows_and_channels(x.shape)
    if rows * channels == 0:
        return torch.zeros(channels, dtype=torch.float64, device="cpu")
    runs = -(-rows // RUN)
    sums = torch.empty((runs, channels), dtype=torch.float64, device="cpu")
    OPENMP.run(sum_runs, runs, x.numel(), 1, KINDS[x.dtype], x, rows, channels, sums)
    OPENMP.run(add_runs, channels, runs * channels, 1, runs, channels, sums)
    return sums[0]


@kernel
def sum_runs(first: int, last: int, kind: int, source: int, rows: int, channels: int, sums: int) -> None:
    """Write each channel's sum over runs first ... last, of RUN rows, to `sums`: float64 (runs, channels)."""
    values = np.empty(min(BLOCK, channels), np.float32)
    for run in range(first, last):
        for left in range(0, channels, BLOCK):
            width = min(BLOCK, channels - left)
            totals = array_at(sums + 8 * (run * channels + left), width, np.float64)
            for i in range(width):
                totals[i] = 0.0
            for row in range(run * RUN, min(run * RUN + RUN, rows)):
                load(kind, source, row * channels + left, width, values)
                for i in range(width):
                    totals[i] += np.float64(abs(values[i]))


@kernel
def add_runs(first: int, last: int, runs: int, channels: int, sums: int) -> None:
    """Add the sums of all runs to the first's, one by one, for channels first ... last."""
    totals = array_at(sums + 8 * first, last - first, np.float64)
    for run in range(1, runs):
        partial = array_at(sums + 8 * (run * channels + first), last - first, np.float64)
        for i in range(last - first):
            totals[i] += partial[i]
