"""Which channels are outliers: sums of magnitudes, their Z-scores, and the ranking."""

import torch
from torch import Tensor

from ..codec import rows_and_channels
from .tiles import CHUNK

RUN = 64  # rows


def channel_sums(x: Tensor) -> Tensor:
    """Return the sum of each channel's magnitudes, float64 (channels,); `x` is contiguous, of any float dtype.

    The order of the additions is part of the definition, so that every backend has the same bits: rows are cut in
    runs of RUN; a run's are added one by one, and then the runs' sums one by one.
    """
    rows, channels = rows_and_channels(x.shape)
    sums = torch.zeros(channels, dtype=torch.float64, device=x.device)
    if rows * channels == 0:
        return sums
    for some in x.detach().view(rows, channels).split(max(1, CHUNK // (RUN * channels)) * RUN):
        for run in _run_sums(some):
            sums += run
    return sums


def _run_sums(x: Tensor) -> Tensor:
    """Return the sums of the runs of `x`, (rows, channels): float64 (runs, channels)."""
    sums = torch.zeros(-(-len(x) // RUN), x.shape[1], dtype=torch.float64, device=x.device)
    for start in range(min(RUN, len(x))):
        rows = x[start::RUN]
        sums[: len(rows)] += rows.double().abs_()
    return sums


def scores_of_sums(sums: Tensor) -> Tensor:
    """Return the Z-scores of float64 (channels,) sums, float32 (channels,): equation 1 of the Adacc paper.

    Means are taken with `tree_sum`. A sum that is not finite scores +inf, and the mean and deviation are those of
    the others. All scores are zero if the sums are equal.
    """
    if not sums.numel():
        return sums.float()
    finite = sums.isfinite()
    # Relative to the smallest sum: equal sums then deviate by exactly zero.
    above = sums - sums.where(finite, torch.inf).amin()
    count = finite.sum()
    deviation = above - tree_sum(above.where(finite, 0.0)) / count
    sigma = (tree_sum(deviation.where(finite, 0.0).square()) / count).sqrt()
    scores = torch.where(sigma > 0, deviation / sigma, 0.0)
    return scores.where(finite, torch.inf).float()


def tree_sum(values: Tensor) -> Tensor:
    """Return the sum of (n,) values, 0-dimensional: padded with zeros to a power of two, the halves are added until
    one number is left."""
    width = 1 << (values.numel() - 1).bit_length()
    values = torch.nn.functional.pad(values, (0, width - values.numel()))
    while width > 1:
        width //= 2
        values = values[:width] + values[width:]
    return values[0]


def rank_by_sums(sums: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `ds_adacc.kernels.rank_outliers` does, for a tensor whose channels have these `sums`."""
    scores = scores_of_sums(sums)
    return scores.argsort(descending=True, stable=True), (scores > threshold).sum(), sums.isfinite().all()
