"""Outlier-separated INT4 and INT8, for Linear and LayerNorm: a few channels raw, the rest in groups."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..codec import Payload, rows_and_channels
from ..width import INT4, Width
from .symmetric import GroupCodec
from .tiles import Tile


class OutlierCodec(GroupCodec):
    """Figure 3(c) of the Adacc paper: outlier channels are kept raw, and are zero in what the groups quantize.

    `channels`: int64 (capacity,), the outlier channels, on the device of the tensors to come. The payload is that
    of GroupCodec and (raw: x.dtype (rows, capacity), indices: int32 (capacity,)). An Inf or NaN in an outlier
    channel comes back in its place and harms no group.

    Raises ValueError if `group_size` is odd or less than two, or `channels` is not a list of int64 indices.
    """

    form = "outlier"

    def __init__(
        self,
        group_size: int,
        channels: Tensor,
        scale: str = "extreme",
        rounding: str = "nearest",
        width: Width = INT4,
    ) -> None:
        super().__init__(group_size, scale, rounding, width)
        if channels.dtype != torch.int64 or channels.dim() != 1:
            raise ValueError(f"channels must be int64 (capacity,); got {channels.dtype} {tuple(channels.shape)}")
        self.channels = channels

    def load(self, x: Tensor, tile: Tile) -> Tensor:
        start, stop = tile.elements.start, tile.elements.stop
        channels = rows_and_channels(x.shape)[1]
        first, last = start // channels, -(-stop // channels)
        rows = x.view(-1, channels)[first:last].to(torch.float32, copy=True)
        flat = rows.index_fill_(1, self.channels, 0.0).view(-1)
        return flat[start - first * channels : stop - first * channels].view(tile.shape)

    def payload_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        rows, _ = rows_and_channels(shape)
        capacity = self.channels.numel()
        return super().payload_bytes(shape, dtype) + rows * capacity * dtype.itemsize + 4 * capacity

    def workspace_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        self._check(dtype)
        # `load` copies whole rows, even of float32, and a tile may begin and end within a row.
        as_copied = super().workspace_bytes(shape, torch.bfloat16)
        return as_copied + 2 * 4 * rows_and_channels(shape)[1] + 8 * self.channels.numel()

    @torch.no_grad()
    def _compress(self, x: Tensor) -> Payload:
        rows = x.view(rows_and_channels(x.shape))
        return *super()._compress(x), rows.index_select(1, self.channels), self.channels.to(torch.int32)

    @torch.no_grad()
    def _decompress(self, payload: Payload, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        codes, scales, raw, indices = payload
        x = super()._decompress((codes, scales), shape, dtype)
        x.view(rows_and_channels(shape)).index_copy_(1, indices.long(), raw)
        return x
