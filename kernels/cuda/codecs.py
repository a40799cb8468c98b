"""The reference's codecs as fused kernels, with the same payloads to the bit: each way reads the tensor once.

Two cases read it twice when they compress: tokens of an odd length, and channels whose rows do not begin at 16-byte
boundaries ("blocks.cu"). Groups of more than 32 KiB and runs of more than 256 rows are read twice too, but the second
time from the cache.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..codec import Payload, draw_seed, rows_and_channels
from ..reference.bits import tile_count
from ..reference.quantized import QuantizedCodec
from .launch import SUFFIX, UNIT_BYTES, Launch, Launching, ceil_div, power_of_two, wide_reciprocal

BLOCK = 256  # threads
TEAM_BYTES = 128  # of a group, held by a thread of groups.cu
WINDOW_BYTES = 8 * UNIT_BYTES * BLOCK  # of a block that decompresses; UNITS in groups.cu: units of a thread
LARGEST_GROUP = 1 << 28  # elements; their places are 32-bit numbers in groups.cu
CHANNEL_ROWS = 8  # HELD in channel.cu: rows that a thread holds


class Launches(NamedTuple):
    """The sizes of a payload and the launches that make it and undo it.

    `groups`: how many have parameters of their own; of "bits", the tiles. `compress` takes the pointers of the tensor
    and of the payload's parts, for outliers those of the channels and of their mask, and the seed if rounding is
    stochastic. `decompress` takes those of the parts and of the tensor.
    """

    code_bytes: int
    groups: int
    compress: Callable[..., None]
    decompress: Callable[..., None]


class _Quantized(Launching, QuantizedCodec):
    """What the INT4 and INT8 codecs share, besides what the reference's codecs have."""

    kind = "group"  # which kernels of groups.cu
    group_size: int
    scale: str

    def _launches_for(self, x: Tensor) -> Launches:
        """Return the launches for a tensor to be read or written."""
        return self._launches(x.shape, x.dtype, x.device)

    def _compress(self, x: Tensor) -> Payload:
        return self._compressed(x)

    def _compressed(self, x: Tensor, separated: Payload = (), tables: tuple[Tensor, ...] = ()) -> Payload:
        """`separated`: room for the payload's last parts. `tables`: what the kernel reads besides the tensor."""
        launches = self._launches_for(x)
        codes = torch.empty(launches.code_bytes, dtype=torch.uint8, device=x.device)
        fitted = [torch.empty(launches.groups, dtype=torch.float32, device=x.device) for _ in range(self.parameters)]
        payload = codes, *fitted, *separated
        launches.compress(*[each.data_ptr() for each in (x, *payload, *tables)], *self._seed())
        return payload

    def _decompress(self, payload: Payload, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        x = torch.empty(shape, dtype=dtype, device=payload[0].device)
        self._launches_for(x).decompress(*[part.data_ptr() for part in payload], x.data_ptr())
        return x

    def _make_launches(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Launches:
        return self._grouped(self.kind, self.group_size, shape, dtype, device)

    def _seed(self) -> tuple[int, ...]:
        """Return the seed of a call, if it has one."""
        return (draw_seed(self.generator),) if self.rounding == "stochastic" else ()

    def _grouped(
        self, kind: str, size: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *numbers: int
    ) -> Launches:
        """Return the launches of the kernels of groups.cu: `kind` of group, "asymmetric", "outlier"."""
        numel, groups = math.prod(shape), self._groups(shape)
        if min(size, numel) > LARGEST_GROUP:
            raise ValueError(
                f"groups have at most {LARGEST_GROUP} elements on CUDA; got {size} for shape {tuple(shape)}"
            )
        size = min(size, max(numel, 2))
        team = power_of_two(ceil_div(size * dtype.itemsize, TEAM_BYTES), 1, BLOCK)
        blocks, windows = ceil_div(groups, BLOCK // team), ceil_div(numel * dtype.itemsize, WINDOW_BYTES)
        get = self._kernels_on(device).get
        compress = get("groups.cu", f"{kind}{self.width.suffix}_compress{self._ending(dtype)}")
        decompress = get("groups.cu", f"{kind}{self.width.suffix}_decompress_{SUFFIX[dtype]}")
        paper = () if kind == "asymmetric" else (int(self.scale == "paper"),)
        return Launches(
            self.width.code_bytes(numel),
            groups,
            Launch(compress, blocks, BLOCK, (numel, size, team, *paper, *numbers)),
            Launch(decompress, windows, BLOCK, (numel, size, wide_reciprocal(size), *numbers)),
        )

    def _unaligned(
        self, length: int, channels: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Launches:
        """Return the launches of the kernels of blocks.cu, for a tensor seen as (runs, length, channels)."""
        numel, groups, get = math.prod(shape), self._groups(shape), self._kernels_on(device).get
        lanes = 32 if channels == 1 else 1
        blocks = ceil_div(numel, 2 * BLOCK)
        common, paper, kind = (numel, length, channels), int(self.scale == "paper"), f"blocks{self.width.suffix}"
        fit = Launch(
            get("blocks.cu", f"{kind}_fit_{SUFFIX[dtype]}"),
            ceil_div(groups * lanes, BLOCK),
            BLOCK,
            (*common, groups, lanes, paper),
        )
        encode = Launch(get("blocks.cu", f"{kind}_encode{self._ending(dtype)}"), blocks, BLOCK, common)
        decode = Launch(get("blocks.cu", f"{kind}_decode_{SUFFIX[dtype]}"), blocks, BLOCK, common)

        def compress(x: int, codes: int, scales: int, *seed: int) -> None:
            fit(x, scales)
            encode(x, scales, codes, *seed)

        return Launches(self.width.code_bytes(numel), groups, compress, decode)

    def _ending(self, dtype: torch.dtype) -> str:
        """Return how the name of a compression kernel ends."""
        return f"_stochastic_{SUFFIX[dtype]}" if self.rounding == "stochastic" else f"_{SUFFIX[dtype]}"


class GroupCodec(_Quantized, reference.GroupCodec):
    __doc__ = reference.GroupCodec.__doc__


class TokenCodec(_Quantized, reference.TokenCodec):
    __doc__ = reference.TokenCodec.__doc__

    def _make_launches(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Launches:
        rows, channels = rows_and_channels(shape)
        if channels % 2 and rows > 1:
            return self._unaligned(channels, 1, shape, dtype, device)
        return self._grouped("group", channels, shape, dtype, device)


class ChannelCodec(_Quantized, reference.ChannelCodec):
    __doc__ = reference.ChannelCodec.__doc__

    def _launches_for(self, x: Tensor) -> Launches:
        return self._launches(x.shape, x.dtype, x.device, x.data_ptr() % UNIT_BYTES == 0)

    def _make_launches(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, aligned: bool = True
    ) -> Launches:
        rows, channels = rows_and_channels(shape)
        units, rest = divmod(channels * dtype.itemsize, UNIT_BYTES)
        if rest or not aligned:
            return self._unaligned(self.group_size, channels, shape, dtype, device)
        down = power_of_two(ceil_div(min(self.group_size, rows), CHANNEL_ROWS), 1, 32)
        across = power_of_two(units, 32 // down, BLOCK // down)
        blocks_across = ceil_div(units, across)
        blocks = ceil_div(rows, self.group_size) * blocks_across
        size, reciprocal = min(self.group_size, rows), ((1 << 32) - 1) // max(1, blocks_across)
        common, get = (rows, channels, size, across, blocks_across, reciprocal), self._kernels_on(device).get
        compress = get("channel.cu", f"{self.name}_compress{self._ending(dtype)}")
        decompress = get("channel.cu", f"{self.name}_decompress_{SUFFIX[dtype]}")
        return Launches(
            self.width.code_bytes(rows * channels),
            self._groups(shape),
            Launch(compress, blocks, across * down, (*common, int(self.scale == "paper"))),
            Launch(decompress, blocks, across * down, common),
        )


class AsymmetricCodec(_Quantized, reference.AsymmetricCodec):
    __doc__ = reference.AsymmetricCodec.__doc__

    kind = "asymmetric"


class OutlierCodec(_Quantized, reference.OutlierCodec):
    __doc__ = reference.OutlierCodec.__doc__

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._masks: dict[tuple, Tensor] = {}

    def _compress(self, x: Tensor) -> Payload:
        rows, width = rows_and_channels(x.shape)
        capacity = self.channels.numel()
        raw, indices = x.new_empty(rows, capacity), torch.empty(capacity, dtype=torch.int32, device=x.device)
        if not capacity:
            return *self._compressed(x), raw, indices
        if not x.numel():  # nothing is launched
            indices.copy_(self.channels)
        return self._compressed(x, (raw, indices), (self.channels, self._mask(width, x.dtype, x.device)))

    def _decompress(self, payload: Payload, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return super()._decompress(payload if self.channels.numel() else payload[:2], shape, dtype)

    def _make_launches(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Launches:
        width, capacity = rows_and_channels(shape)[1], self.channels.numel()
        if not capacity:
            return super()._make_launches(shape, dtype, device)
        numbers = width, capacity, power_of_two(capacity, 1, 1 << 30), wide_reciprocal(width)
        return self._grouped("outlier", self.group_size, shape, dtype, device, *numbers)

    def _mask(self, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a row of integers as wide as the elements: 0 for an outlier channel, all bits set for the others."""
        key = width, dtype, device
        if key not in self._masks:
            words = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
            self._masks[key] = torch.full((width,), -1, dtype=words, device=device).index_fill_(0, self.channels, 0)
        return self._masks[key]


class BitsCodec(Launching, reference.BitsCodec):
    __doc__ = reference.BitsCodec.__doc__

    RESTORED_BYTES = 4 * UNIT_BYTES * BLOCK  # by a block; HELD in bits.cu: units that a thread holds

    def _compress(self, x: Tensor) -> Payload:
        launches = self._launches(x.shape, x.dtype, x.device)
        bits = torch.empty(launches.code_bytes, dtype=torch.uint8, device=x.device)
        values = torch.empty(2 * launches.groups, dtype=x.dtype, device=x.device)
        launches.compress(x.data_ptr(), bits.data_ptr(), values.data_ptr())
        return bits, values

    def _decompress(self, payload: Payload, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        bits, values = payload
        x = torch.empty(shape, dtype=dtype, device=bits.device)
        self._launches(x.shape, dtype, x.device).decompress(bits.data_ptr(), values.data_ptr(), x.data_ptr())
        return x

    def _make_launches(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Launches:
        numel, width, get = math.prod(shape), dtype.itemsize, self._kernels_on(device).get
        tiles, restoring = tile_count(numel), ceil_div(numel * width, self.RESTORED_BYTES)
        return Launches(
            ceil_div(numel, 8),
            tiles,
            Launch(get("bits.cu", f"bits_compress_{width}"), tiles, BLOCK, (numel,)),
            Launch(get("bits.cu", f"bits_decompress_{width}"), restoring, BLOCK, (numel,)),
        )
