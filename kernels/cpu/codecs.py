"""The reference codecs with compiled kernels in place of torch: the same payloads and results, to the bit."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..codec import Codec, Payload, draw_seed, rows_and_channels
from ..reference.bits import tile_count
from ..reference.quantized import QuantizedCodec
from . import bits, channelwise, groups
from .memory import KINDS, fresh
from .openmp import OPENMP
from .quantize import ASYMMETRIC, EXTREME, NEAREST, PAPER

METHODS = {"extreme": EXTREME, "paper": PAPER}
_NO_OUTLIERS = 0, 0, 0  # the address of their channels, how many these are, and the address of their numbers
SLACK = 512  # bytes that the allocators may add to the buffers of a thread: about 128 for each of up to three


class CompiledCodec(Codec):
    """Takes tensors in host memory. Raises ValueError for any other, and for a payload that does not fit the shape."""

    def compress(self, x: Tensor) -> Payload:
        self._check_device(x)
        return super().compress(x)

    def decompress(self, payload: Payload, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        for part in payload:
            self._check_device(part)
        return super().decompress(payload, shape, dtype)

    def _check_device(self, x: Tensor) -> None:
        if x.device.type != "cpu":
            raise ValueError(
                f"codec {self.name!r} of the backend 'cpu' takes tensors on the CPU; got one on {x.device}"
            )

    def _check_payload(self, payload: Payload, sizes: Sequence[int], shape: Sequence[int]) -> None:
        found = [part.nbytes for part in payload]
        if found != list(sizes) or not all(part.is_contiguous() for part in payload):
            raise ValueError(
                f"the payload of shape {tuple(shape)} for codec {self.name!r} is contiguous tensors of {list(sizes)} "
                f"bytes; got {found}"
            )


class CompiledQuantized(CompiledCodec, QuantizedCodec):
    """What the INT4 and INT8 codecs share: room for a payload, and what a call needs besides."""

    def _room(self, x: Tensor) -> list[Tensor]:
        sizes = [self._groups(x.shape)] * self.parameters
        codes = torch.empty(self.width.code_bytes(x.numel()), dtype=torch.uint8, device="cpu")
        return [codes, *(torch.empty(size, dtype=torch.float32, device="cpu") for size in sizes)]

    def _sizes(self, shape: Sequence[int]) -> list[int]:
        return [self.width.code_bytes(math.prod(shape)), *[4 * self._groups(shape)] * self.parameters]

    def _seed(self) -> int:
        return draw_seed(self.generator) if self.rounding == "stochastic" else NEAREST

    def _buffers(self, block: int, others: int) -> int:
        """Return a bound on the bytes of all threads' buffers: in each, `block` elements and `others` bytes."""
        words = 4 * (block + 8) if self.rounding == "stochastic" else 0
        numbers_and_codes = (4 + 4) * block
        return torch.get_num_threads() * (numbers_and_codes + words + others + SLACK)


class CompiledGroups(CompiledQuantized):
    """Groups of neighbours in memory."""

    scale: str
    group_size: int

    @property
    def method(self) -> int:
        """How scales are fitted."""
        return METHODS[self.scale]

    def _length(self, shape: Sequence[int]) -> int:
        return self.group_size

    def workspace_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        self._check(dtype)
        length = self._length(shape)
        return self._buffers(
            groups.block_elements(length, math.prod(shape)), groups.BYTES_A_GROUP * groups.block_groups(length)
        )

    def _compress(self, x: Tensor) -> Payload:
        return self._compressed(x)

    def _decompress(self, payload: Payload, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._decompressed(payload, shape, dtype)

    def _compressed(self, x: Tensor, outliers: tuple[Tensor | int, ...] = _NO_OUTLIERS) -> Payload:
        codes, scales, *offsets = payload = self._room(x)
        how = self._length(x.shape), self.width.bits, self.method, self._seed()
        described = (KINDS[x.dtype], x, x.numel(), *how, codes, scales, *(offsets or [0]))
        separated = rows_and_channels(x.shape)[1], *outliers
        OPENMP.run(groups.compress_groups, self._groups(x.shape), x.numel(), 2, *described, *separated)
        return tuple(payload)

    def _decompressed(
        self,
        payload: Payload,
        shape: Sequence[int],
        dtype: torch.dtype,
        outliers: tuple[Tensor | int, ...] = _NO_OUTLIERS,
    ) -> Tensor:
        self._check_payload(payload, self._sizes(shape), shape)
        x = fresh(shape, dtype)
        codes, scales, *offsets = payload
        cut = x.numel(), self._length(x.shape), self.width.bits
        described = (KINDS[x.dtype], x, *cut, codes, scales, *(offsets or [0]))
        rejoined = rows_and_channels(x.shape)[1], *outliers
        OPENMP.run(groups.decompress_groups, self._groups(x.shape), x.numel(), 2, *described, *rejoined)
        return x


class GroupCodec(CompiledGroups, reference.GroupCodec):
    """See `reference.GroupCodec`."""


class TokenCodec(CompiledGroups, reference.TokenCodec):
    """See `reference.TokenCodec`. Threads share the work by rows, at least two each."""

    def _length(self, shape: Sequence[int]) -> int:
        return max(1, rows_and_channels(shape)[1])


class AsymmetricCodec(CompiledGroups, reference.AsymmetricCodec):
    """See `reference.AsymmetricCodec`."""

    method = ASYMMETRIC


class OutlierCodec(CompiledGroups, reference.OutlierCodec):
    """See `reference.OutlierCodec`. Raises IndexError if a tensor does not have the channels."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._check_device(self.channels)
        # A copy, since kernels read it by address, without strides, and its ends are looked at only here.
        self.channels = self.channels.clone(memory_format=torch.contiguous_format)
        self._ends = _ends(self.channels)

    def workspace_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return super().workspace_bytes(shape, dtype) + 8 * self.channels.numel()

    def _compress(self, x: Tensor) -> Payload:
        rows, width = rows_and_channels(x.shape)
        self._check_channels(self.channels, self._ends, width)
        capacity = self.channels.numel()
        raw = x.new_empty((rows, capacity))
        return *self._compressed(x, (self.channels, capacity, raw)), raw, self.channels.to(torch.int32)

    def _decompress(self, payload: Payload, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        rows, width = rows_and_channels(shape)
        capacity = payload[-1].numel()
        self._check_payload(payload, [*self._sizes(shape), rows * capacity * dtype.itemsize, 4 * capacity], shape)
        *grouped, raw, indices = payload
        channels = indices.long()
        self._check_channels(channels, _ends(channels), width)
        return self._decompressed(tuple(grouped), shape, dtype, (channels, capacity, raw))

    def _check_channels(self, channels: Tensor, ends: tuple[int, int] | None, width: int) -> None:
        if ends is not None and not 0 <= ends[0] <= ends[1] < width:
            raise IndexError(f"outlier channels must be in 0 ... {width - 1}; got {channels.tolist()}")


def _ends(channels: Tensor) -> tuple[int, int] | None:
    """Return the least and the greatest channel; None if there is none."""
    if not channels.numel():
        return None
    least, greatest = torch.aminmax(channels)
    return int(least), int(greatest)


class ChannelCodec(CompiledQuantized, reference.ChannelCodec):
    """See `reference.ChannelCodec`. Threads share the work by runs and strips of channels."""

    def workspace_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        self._check(dtype)
        _, channels = rows_and_channels(shape)
        return self._buffers(channelwise.block_elements(channels), 8 * channelwise.strip_of(channels))

    def _compress(self, x: Tensor) -> Payload:
        codes, scales = self._room(x)
        described = (*self._described(x), METHODS[self.scale], self._seed(), codes, scales)
        OPENMP.run(channelwise.compress_channels, self._tiles(x.shape), x.numel(), 1, *described)
        return codes, scales

    def _decompress(self, payload: Payload, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self._check_payload(payload, self._sizes(shape), shape)
        x = fresh(shape, dtype)
        described = (*self._described(x), *payload)
        OPENMP.run(channelwise.decompress_channels, self._tiles(shape), x.numel(), 1, *described)
        return x

    def _described(self, x: Tensor) -> tuple[int | Tensor, ...]:
        rows, channels = rows_and_channels(x.shape)
        return KINDS[x.dtype], x, rows, channels, self.group_size, channelwise.strip_of(channels), self.width.bits

    def _tiles(self, shape: Sequence[int]) -> int:
        rows, channels = rows_and_channels(shape)
        return -(-rows // self.group_size) * -(-channels // channelwise.strip_of(channels)) if rows * channels else 0


class BitsCodec(CompiledCodec, reference.BitsCodec):
    """See `reference.BitsCodec`."""

    def workspace_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        self._check(dtype)
        return (bits.BLOCK + SLACK) * torch.get_num_threads()

    def _compress(self, x: Tensor) -> Payload:
        packed = torch.empty((x.numel() + 7) // 8, dtype=torch.uint8, device="cpu")
        values = x.new_empty(2 * tile_count(x.numel()))
        described = (x.itemsize, x, x.numel(), packed, values)
        OPENMP.run(bits.compress_bits, tile_count(x.numel()), x.numel(), 1, *described)
        return packed, values

    def _decompress(self, payload: Payload, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        numel = math.prod(shape)
        self._check_payload(payload, [(numel + 7) // 8, 2 * dtype.itemsize * tile_count(numel)], shape)
        x = fresh(shape, dtype)
        described = (x.itemsize, x, numel, *payload)
        OPENMP.run(bits.decompress_bits, -(-numel // bits.BLOCK), numel, 1, *described)
        return x
