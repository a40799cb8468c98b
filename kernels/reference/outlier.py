"""Outlier-separated INT4, for Linear and LayerNorm: a few channels raw, the rest in groups."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..codec import Payload, rows_and_channels
from .pieces import CHUNK, Piece
from .symmetric import GroupCodec


class OutlierCodec(GroupCodec):
    """Figure 3(c) of the Adacc paper: outlier channels are kept raw, and are zero in what the groups quantize.

    `channels`: int64 (capacity,), the outlier channels, on the device of the tensors to come. The payload is that
    of GroupCodec and (raw: x.dtype (rows, capacity), indices: int32 (capacity,)). An Inf or NaN in an outlier
    channel comes back in its place and harms no group.

    Raises ValueError if `group_size` is odd or less than two, or `channels` is not a list of int64 indices.
    """

    name = "outlier"

    def __init__(self, group_size: int, channels: Tensor) -> None:
        super().__init__(group_size)
        if channels.dtype != torch.int64 or channels.dim() != 1:
            raise ValueError(f"channels must be int64 (capacity,); got {channels.dtype} {tuple(channels.shape)}")
        self.channels = channels

    def load(self, x: Tensor, piece: Piece) -> Tensor:
        start, stop = piece.elements.start, piece.elements.stop
        channels = rows_and_channels(x.shape)[1]
        first, last = start // channels, -(-stop // channels)
        rows = x.view(-1, channels)[first:last].to(torch.float32, copy=True)
        flat = rows.index_fill_(1, self.channels, 0.0).view(-1)
        return flat[start - first * channels : stop - first * channels].view(piece.shape)

    def payload_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        rows, _ = rows_and_channels(shape)
        capacity = self.channels.numel()
        return super().payload_bytes(shape, dtype) + rows * capacity * dtype.itemsize + 4 * capacity

    def workspace_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        self._check(dtype)
        # `load` copies even float32, by whole rows: a piece may begin and end within some.
        as_copied = super().workspace_bytes(shape, torch.bfloat16)
        return as_copied + 2 * 4 * rows_and_channels(shape)[1] + 8 * self.channels.numel()

    def _compress(self, x: Tensor) -> Payload:
        rows = x.view(rows_and_channels(x.shape))
        return *super()._compress(x), rows.index_select(1, self.channels), self.channels.to(torch.int32)

    def _decompress(self, payload: Payload, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        codes, scales, raw, indices = payload
        x = super()._decompress((codes, scales), shape, dtype)
        x.view(rows_and_channels(shape)).index_copy_(1, indices.long(), raw)
        return x


def channel_scores(x: Tensor) -> Tensor:
    """Return the Z-score of every channel of a contiguous `x`, float32 (channels,): equation 1 of the Adacc paper.

    The score tells by how many standard deviations the sum of a channel's magnitudes exceeds the mean over
    channels. It is zero if all sums are equal. A channel whose sum is not finite scores +inf, and the mean and
    deviation are those of the others.
    """
    rows, channels = rows_and_channels(x.shape)
    if rows * channels == 0:
        return torch.zeros(channels, dtype=torch.float32, device=x.device)
    sums = torch.zeros(channels, dtype=torch.float32, device=x.device)
    for some in x.detach().view(rows, channels).split(max(1, CHUNK // channels)):
        sums += torch.linalg.vector_norm(some, ord=1, dim=0, dtype=torch.float32)
    finite = sums.isfinite()
    # Above the smallest sum, rather than zero: equal sums then deviate by zero exactly.
    above = sums.double() - sums.where(finite, torch.inf).amin()
    count = finite.sum()
    deviation = above - above.where(finite, 0).sum() / count
    sigma = (deviation.where(finite, 0).square().sum() / count).sqrt()
    scores = torch.where(sigma > 0, deviation / sigma, 0.0)
    return scores.where(finite, torch.inf).float()


def rank_outliers(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return (order, count): channels of `x` by falling score, int64 (channels,), and how many exceed `threshold`.

    `x` is as for `channel_scores`. Channels of the same score keep their order. `count` is int64 (), on the device:
    nothing waits for it.
    """
    scores = channel_scores(x)
    return scores.argsort(descending=True, stable=True), (scores > threshold).sum()
