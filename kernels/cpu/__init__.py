"""Codecs compiled for the CPU by Numba: the reference's payloads and results, nearly as fast as memory allows."""

import torch
from torch import Tensor

from ..codec import by_form, rows_and_channels
from ..reference.scores import RUN
from .codecs import AsymmetricCodec, BitsCodec, ChannelCodec, GroupCodec, OutlierCodec, TokenCodec
from .memory import KINDS
from .openmp import OPENMP
from .sums import add_runs, sum_runs

__all__ = ["CLASSES", "channel_sums"]

CLASSES = by_form(AsymmetricCodec, BitsCodec, ChannelCodec, GroupCodec, OutlierCodec, TokenCodec)


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
