"""Kernels for one bit an element: "bits"."""

import numpy as np

from ..reference.bits import TILE
from .compiling import inner, kernel
from .memory import array_at

BLOCK = 4096  # elements at a time, so that their flags stay in the L1 cache; TILE is a multiple


@kernel
def compress_bits(first: int, last: int, width: int, source: int, elements: int, bits: int, values: int) -> None:
    """Compress tiles first ... last of a tensor: write a bit for each element to `bits`, and two values for each tile.

    The tensor at `source` has `elements` of `width` bytes, taken as uint8, int16, int32 or int64; so do the `values`.
    """
    flags = np.empty(BLOCK, np.uint8)
    for tile in range(first, last):
        start, count, place = tile * TILE, min(TILE, elements - tile * TILE), values + 2 * tile * width
        packed = bits + start // 8
        if width == 1:
            compress_tile(array_at(source + start, count, np.uint8), array_at(place, 2, np.uint8), flags, packed)
        elif width == 2:
            compress_tile(array_at(source + 2 * start, count, np.int16), array_at(place, 2, np.int16), flags, packed)
        elif width == 4:
            compress_tile(array_at(source + 4 * start, count, np.int32), array_at(place, 2, np.int32), flags, packed)
        else:
            compress_tile(array_at(source + 8 * start, count, np.int64), array_at(place, 2, np.int64), flags, packed)


@inner
def compress_tile(numbers: np.ndarray, ends: np.ndarray, flags: np.ndarray, packed: int) -> None:
    """Write the least and the greatest number into `ends`, and at the address `packed` which ones are the greatest."""
    low = high = numbers[0]
    for i in range(len(numbers)):
        one = numbers[i]
        low = one if one < low else low
        high = one if one > high else high
    ends[0], ends[1] = low, high
    for start in range(0, len(numbers), BLOCK):
        block = numbers[start : start + BLOCK]
        for i in range(len(block)):
            flags[i] = block[i] == high
        for i in range(len(block), BLOCK):
            flags[i] = 0
        pack(flags, array_at(packed + start // 8, (len(block) + 7) // 8, np.uint8))


@inner
def pack(flags: np.ndarray, packed: np.ndarray) -> None:
    """Write eight flags to a byte, the first in the lowest bit."""
    eights = array_at(flags.ctypes.data, BLOCK // 8, np.uint64)
    for i in range(len(packed)):
        bits = eights[i]
        bits |= bits >> np.uint64(7)
        bits |= bits >> np.uint64(14)
        bits |= bits >> np.uint64(28)
        packed[i] = np.uint8(bits & np.uint64(255))


@kernel
def decompress_bits(first: int, last: int, width: int, target: int, elements: int, bits: int, values: int) -> None:
    """Write a value of its tile for each bit of blocks first ... last to the tensor at `target`."""
    flags = np.empty(BLOCK, np.uint8)
    for block in range(first, last):
        start, count = block * BLOCK, min(BLOCK, elements - block * BLOCK)
        place = values + 2 * (start // TILE) * width
        unpack(array_at(bits + start // 8, (count + 7) // 8, np.uint8), flags)
        if width == 1:
            choose(flags, array_at(place, 2, np.uint8), array_at(target + start, count, np.uint8))
        elif width == 2:
            choose(flags, array_at(place, 2, np.int16), array_at(target + 2 * start, count, np.int16))
        elif width == 4:
            choose(flags, array_at(place, 2, np.int32), array_at(target + 4 * start, count, np.int32))
        else:
            choose(flags, array_at(place, 2, np.int64), array_at(target + 8 * start, count, np.int64))


@inner
def unpack(packed: np.ndarray, flags: np.ndarray) -> None:
    """Write the flags of some bytes, eight a byte, each 0 or 1."""
    eights = array_at(flags.ctypes.data, BLOCK // 8, np.uint64)
    for i in range(len(packed)):
        bits = np.uint64(packed[i])
        bits = (bits | bits << np.uint64(28)) & np.uint64(0x0000000F0000000F)
        bits = (bits | bits << np.uint64(14)) & np.uint64(0x0003000300030003)
        eights[i] = (bits | bits << np.uint64(7)) & np.uint64(0x0101010101010101)


@inner
def choose(flags: np.ndarray, values: np.ndarray, numbers: np.ndarray) -> None:
    """Write the second value where a flag is set, the first elsewhere."""
    low, high = values[0], values[1]
    for i in range(len(numbers)):
        numbers[i] = high if flags[i] else low
