"""Kernels for one bit an element: "bits"."""

import numpy as np

from .compiling import inner, kernel
from .memory import array_at

BLOCK = 4096  # elements at a time, so that their flags stay in the L1 cache; a multiple of 8
SLICES = 64  # of a tensor; the extremes of each are found separately, so that threads can share the work


@kernel
def compress_bits(
    first: int, last: int, width: int, source: int, elements: int, size: int, value: int, bits: int, ends: int
) -> None:
    """Compress slices first ... last of a tensor: write a bit for each element, whether it is `value`, to `bits`.

    The tensor at `source` has `elements` of `width` bytes, taken as uint8, int16, int32 or int64; a slice has `size`,
    a multiple of BLOCK. The least and the greatest of each slice go to `ends`, int64 (slices, 2).
    """
    flags = np.empty(BLOCK, np.uint8)
    for tile in range(first, last):
        found = array_at(ends + 16 * tile, 2, np.int64)
        found[0], found[1] = np.int64(0x7FFFFFFFFFFFFFFF), np.int64(-0x8000000000000000)
        for start in range(tile * size, min(tile * size + size, elements), BLOCK):
            count = min(BLOCK, elements - start)
            if width == 1:
                scan(array_at(source + start, count, np.uint8), np.uint8(value), flags, found)
            elif width == 2:
                scan(array_at(source + 2 * start, count, np.int16), np.int16(value), flags, found)
            elif width == 4:
                scan(array_at(source + 4 * start, count, np.int32), np.int32(value), flags, found)
            else:
                scan(array_at(source + 8 * start, count, np.int64), np.int64(value), flags, found)
            for i in range(count, BLOCK):
                flags[i] = 0
            pack(flags, array_at(bits + start // 8, (count + 7) // 8, np.uint8))


@inner
def scan(numbers: np.ndarray, value: int, flags: np.ndarray, found: np.ndarray) -> None:
    """Write into `flags`, uint8, whether each number is the value, and widen `found` to their range."""
    low = high = numbers[0]
    for i in range(len(numbers)):
        one = numbers[i]
        low, high = one if one < low else low, one if one > high else high
        flags[i] = one == value
    found[0] = low if low < found[0] else found[0]
    found[1] = high if high > found[1] else found[1]


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
def decompress_bits(
    first: int, last: int, width: int, target: int, elements: int, low: int, high: int, bits: int
) -> None:
    """Write the pattern `low` or `high` for each bit of blocks first ... last to the tensor at `target`."""
    flags = np.empty(BLOCK, np.uint8)
    for block in range(first, last):
        start, count = block * BLOCK, min(BLOCK, elements - block * BLOCK)
        unpack(array_at(bits + start // 8, (count + 7) // 8, np.uint8), flags)
        if width == 1:
            choose(flags, np.uint8(low), np.uint8(high), array_at(target + start, count, np.uint8))
        elif width == 2:
            choose(flags, np.int16(low), np.int16(high), array_at(target + 2 * start, count, np.int16))
        elif width == 4:
            choose(flags, np.int32(low), np.int32(high), array_at(target + 4 * start, count, np.int32))
        else:
            choose(flags, np.int64(low), np.int64(high), array_at(target + 8 * start, count, np.int64))


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
def choose(flags: np.ndarray, low: int, high: int, numbers: np.ndarray) -> None:
    """Write `high` where a flag is set, `low` elsewhere."""
    for i in range(len(numbers)):
        numbers[i] = high if flags[i] else low
