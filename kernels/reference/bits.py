"""One bit an element, for tensors of two values: dropout masks and dropout noise."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..codec import Codec, Payload
from .tiles import CHUNK

TILE = 1 << 14  # elements

_PATTERN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class BitsCodec(Codec):
    """The lossless compression of section 3.2 of the Adacc paper, for masks and for two-valued floats alike.

    The payload is (bits: uint8 (ceil(numel / 8),), values: x.dtype (2 * tiles,)). Each TILE of the flat array has two
    values of its own, the lesser bit pattern first, so that no tile need know another. Bit i % 8 of byte i // 8 chooses
    the value of element i. Values are told apart by their bit patterns, so -0.0, Inf and NaN come back as they were.

    A tensor of more than two values does not come back as it was: call `is_two_valued` before.
    """

    form = "bits"
    lossless = True
    dtypes = (torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64)

    def payload_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        self._check(dtype)
        numel = math.prod(shape)
        return (numel + 7) // 8 + 2 * dtype.itemsize * tile_count(numel)

    def workspace_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        self._check(dtype)
        numel = math.prod(shape)
        return 3 * min(CHUNK, numel + 8) + 3 * dtype.itemsize * min(CHUNK // TILE, tile_count(numel)) + 64

    @torch.no_grad()
    def _compress(self, x: Tensor) -> Payload:
        flat = patterns(x)
        bits = torch.empty((x.numel() + 7) // 8, dtype=torch.uint8, device=x.device)
        values = torch.empty(tile_count(x.numel()), 2, dtype=flat.dtype, device=x.device)
        for start, stop, length in _pieces(x.numel()):
            part, ends = flat[start:stop].view(-1, length), values[start // TILE : tile_count(stop)]
            ends[:, 0], ends[:, 1] = part.amin(1), part.amax(1)
            pack_bits((part == ends[:, 1:]).view(-1), out=bits[start // 8 : (stop + 7) // 8])
        return bits, values.view(-1).view(x.dtype)

    @torch.no_grad()
    def _decompress(self, payload: Payload, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        bits, values = payload
        x = torch.empty(shape, dtype=dtype, device=bits.device)
        for start, stop, length in _pieces(x.numel()):
            part = patterns(x)[start:stop].view(-1, length)
            low, high = patterns(values).view(-1, 2)[start // TILE : tile_count(stop)].split(1, 1)
            chosen = unpack_bits(bits[start // 8 : (stop + 7) // 8], stop - start)
            part.copy_(chosen.view_as(part)).mul_(low ^ high).bitwise_xor_(low)
        return x


def tile_count(numel: int) -> int:
    """Return how many tiles, whole or not, so many elements are."""
    return -(-numel // TILE)


def _pieces(numel: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, length) of pieces of a flat array that stay in the cache; each is tiles of one length."""
    full, step = numel - numel % TILE, max(TILE, CHUNK - CHUNK % TILE)
    for start in range(0, full, step):
        yield start, min(start + step, full), TILE
    if full < numel:
        yield full, numel, numel - full


def patterns(x: Tensor) -> Tensor:
    """Return the elements of a contiguous tensor as integers of the same width: (numel,)."""
    return x.view(-1).view(_PATTERN[x.dtype.itemsize])


def is_two_valued(x: Tensor) -> bool:
    """Return whether a contiguous tensor has at most two values (as bit patterns). Waits for the device."""
    flat = patterns(x)
    if not flat.numel():
        return True
    low, high = flat.amin(), flat.amax()
    return all(bool(((part == low) | (part == high)).all()) for part in flat.split(CHUNK))


def pack_bits(flags: Tensor, out: Tensor) -> None:
    """Write bool flags (n,) into `out`: uint8 (ceil(n / 8),), the first in the lowest bit; missing ones are 0."""
    if flags.numel() % 8:
        flags = torch.nn.functional.pad(flags, (0, -flags.numel() % 8))
    bits = flags.view(torch.int64)
    for shift in (7, 14, 28):
        bits = (bits >> shift).bitwise_or_(bits)
    out.copy_(bits)  # copying int64 to uint8 keeps the low byte


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    """Return the first `numel` flags that `pack_bits` wrote: bool (numel,)."""
    bits = packed.to(torch.int64)
    for shift, mask in ((28, 0x0000000F0000000F), (14, 0x0003000300030003), (7, 0x0101010101010101)):
        bits = (bits << shift).bitwise_or_(bits).bitwise_and_(mask)
    return bits.view(torch.bool)[:numel]
