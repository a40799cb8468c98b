"""What the INT4 and INT8 codecs share: codes in bytes, and the walk over a tensor's groups."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..codec import Codec, Payload, draw_seed
from ..width import INT4, INT8, Width
from .philox import uniform
from .tiles import Block, Tile, tiles

SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def pack(codes: Tensor, out: Tensor, width: Width) -> None:
    """Write int8 codes, shape (n,), into `out`: uint8, shape (width.code_bytes(n),).

    In INT4, byte i is (code[2i] + 8) | (code[2i + 1] + 8) << 4, where a code missing at the end has the nibble 0. In
    INT8, byte i is code[i] + 128.
    """
    if width == INT8:
        torch.bitwise_xor(codes.view(torch.uint8), 128, out=out)
        return
    nibbles = codes + 8
    if nibbles.numel() % 2:
        nibbles = torch.nn.functional.pad(nibbles, (0, 1))
    pairs = nibbles.view(torch.int16)
    out.copy_((pairs >> 4).bitwise_or_(pairs))  # copying int16 to uint8 keeps the low byte


def unpack(packed: Tensor, numel: int, width: Width) -> Tensor:
    """Return the first `numel` codes that `pack` wrote: int8, shape (numel,)."""
    if width == INT8:
        return packed.bitwise_xor(128).view(torch.int8)
    pairs = packed.to(torch.int16)
    nibbles = (pairs << 4).bitwise_or_(pairs).bitwise_and_(0x0F0F)
    return nibbles.view(torch.int8)[:numel].sub_(8)


def normal(scale: Tensor) -> Tensor:
    """Return `scale` with zero for what is below the smallest normal number, whose reciprocal may overflow."""
    return scale.masked_fill(scale.abs() < SMALLEST_SCALE, 0.0)


def reciprocal(scale: Tensor) -> Tensor:
    """Return 1 / scale, and zero where the scale is zero, infinite or NaN."""
    return scale.reciprocal().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def to_codes(values: Tensor, width: Width) -> Tensor:
    """Round float32 values to the nearest (halves to even) and clip them to the codes: int8. Consumes `values`."""
    return values.round_().clamp_(-width.half, width.half - 1).to(torch.int8)


def to_random_codes(values: Tensor, uniform: Tensor, width: Width) -> Tensor:
    """Round float32 values down, or up where `uniform`, in [0, 1), is below their fraction; clip as `to_codes`.

    Without the clip, a value's expected code is the value itself: GACT (Liu et al., ICML 2022) and ActNN round so.
    """
    floor = values.floor()
    return floor.add_(uniform < values - floor).clamp_(-width.half, width.half - 1).to(torch.int8)


def check_group_size(group_size: int) -> int:
    """Return `group_size`, or raise ValueError if it is odd or less than two: groups begin at whole bytes."""
    if group_size < 2 or group_size % 2:
        raise ValueError(f"group_size must be even and at least 2, as two 4-bit codes share a byte; got {group_size}")
    return group_size


class QuantizedCodec(Codec):
    """Quantization to a `width` of bits in the tensor's memory order, with float32 parameters for each group.

    The payload is uint8 codes (width.code_bytes(numel),) and `parameters` tensors, float32 (groups,). All arithmetic
    is done in float32, whatever the tensor's dtype, with one rounding an operation (no fused multiply-add); the last
    step rounds to the dtype.

    A group that holds Inf or NaN comes back non-finite throughout. The codes of such a group are unspecified.

    With the `rounding` "stochastic", a call draws one seed from the `generator`, and an element's code depends on its
    value, its index and the seed: see `philox.uniform`.
    """

    lossless: ClassVar[bool] = False
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.float16, torch.bfloat16)
    parameters: ClassVar[int] = 1

    def __init__(self, rounding: str = "nearest", width: Width = INT4) -> None:
        self.rounding = rounding
        self.width = width

    @property
    def name(self) -> str:
        return self.form + self.width.suffix

    @abstractmethod
    def blocks(self, shape: Sequence[int]) -> list[Block]:
        """Return the groups of a tensor of this shape, as consecutive blocks of its memory."""

    @abstractmethod
    def quantize(self, block: Tensor) -> tuple[Tensor, ...]:
        """Return (values, *parameters) of a float32 block (runs, length, channels), which must be left as it is.

        Values, in the block's shape, are the codes before rounding; parameters are (runs, 1, channels); all float32.
        """

    @abstractmethod
    def dequantize_(self, values: Tensor, *parameters: Tensor) -> None:
        """Turn a float32 block of codes into the numbers they stand for, in place."""

    def load(self, x: Tensor, tile: Tile) -> Tensor:
        """Return the tile of `x` as a float32 block."""
        return x.view(-1)[tile.elements].view(tile.shape).float()

    def payload_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        self._check(dtype)
        return self.width.code_bytes(math.prod(shape)) + 4 * self.parameters * self._groups(shape)

    def workspace_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        self._check(dtype)
        each = 5 if dtype == torch.float32 else 9  # the float32 copy, the scaled numbers, the int8 codes
        cut = list(tiles(self.blocks(shape)))
        elements = max((tile.shape.runs * tile.shape.length * tile.shape.channels for tile in cut), default=0)
        groups = max((tile.shape.runs * tile.shape.channels for tile in cut), default=0)
        # Four numbers are drawn at a time, and a tile may begin and end within four.
        drawn = 24 * (elements + 8) if self.rounding == "stochastic" and elements else 0
        return each * elements + drawn + 28 * groups

    @torch.no_grad()
    def _compress(self, x: Tensor) -> Payload:
        codes = torch.empty(self.width.code_bytes(x.numel()), dtype=torch.uint8, device=x.device)
        groups = self._groups(x.shape)
        parameters = [torch.empty(groups, dtype=torch.float32, device=x.device) for _ in range(self.parameters)]
        seed = draw_seed(self.generator) if self.rounding == "stochastic" else None
        for tile in tiles(self.blocks(x.shape)):
            block = self.load(x, tile)
            packed = codes[self.width.code_slice(tile.elements)]
            self._compress_piece(block, tile, packed, [p[tile.groups] for p in parameters], seed)
        return codes, *parameters

    def _compress_piece(
        self, block: Tensor, tile: Tile, packed: Tensor, parameters: Sequence[Tensor], seed: int | None
    ) -> None:
        values, *fitted = self.quantize(block)
        codes = self._round(values.view(-1), tile, seed)
        del values  # `workspace_bytes` assumes that it is freed here
        pack(codes, packed, self.width)
        for kept, new in zip(parameters, fitted, strict=True):
            kept.copy_(new.view(-1))

    def _round(self, values: Tensor, tile: Tile, seed: int | None) -> Tensor:
        if seed is None:
            return to_codes(values, self.width)
        drawn = uniform(tile.elements.start, tile.elements.stop, seed, values.device)
        return to_random_codes(values, drawn, self.width)

    @torch.no_grad()
    def _decompress(self, payload: Payload, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        codes, *parameters = payload
        x = torch.empty(shape, dtype=dtype, device=codes.device)
        for tile in tiles(self.blocks(x.shape)):
            self._decompress_piece(x.view(-1)[tile.elements], tile, codes, parameters)
        return x

    def _decompress_piece(self, out: Tensor, tile: Tile, codes: Tensor, parameters: Sequence[Tensor]) -> None:
        values = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        packed = codes[self.width.code_slice(tile.elements)]
        values.copy_(unpack(packed, out.numel(), self.width))
        runs, _, channels = tile.shape
        fitted = [p[tile.groups].view(runs, 1, channels) for p in parameters]
        self.dequantize_(values.view(tile.shape), *fitted)
        if values is not out:
            out.copy_(values)

    def _groups(self, shape: Sequence[int]) -> int:
        return sum(block.runs * block.channels for block in self.blocks(shape))
