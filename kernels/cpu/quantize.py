"""The arithmetic of INT4 and INT8 on blocks of float32 in the L1 cache: scales, rounding, and codes in bytes.

All of it is to the bit what the reference codecs compute with torch. Loops have no branches, so that they vectorize:
numbers are compared as integers, which also lets NaN win.
"""

import numpy as np

from ..reference.asymmetric import GREATEST, STEP
from ..reference.philox import MULTIPLIERS, WEYL
from ..reference.quantized import SMALLEST_SCALE
from ..width import INT4, INT8
from .compiling import inner
from .memory import array_at, as_bits, as_float

EXTREME, PAPER, ASYMMETRIC = 0, 1, 2  # methods
NEAREST = -1  # in place of a seed

SMALLEST, LARGEST = np.float32(SMALLEST_SCALE), np.float32(GREATEST)
STEP_4, STEP_8 = np.float32(STEP[INT4]), np.float32(STEP[INT8])
# Adding 1.5 * 2^23 rounds a small float32 to an integer, halves to even, and leaves it in the low bits.
ROUNDER, ROUNDER_BITS = np.float32(1.5 * 2**23), np.int32(0x4B400000)
LEAST_4, GREATEST_4 = np.int32(ROUNDER_BITS - 8), np.int32(ROUNDER_BITS + 7)
LEAST_8, GREATEST_8 = np.int32(ROUNDER_BITS - 128), np.int32(ROUNDER_BITS + 127)
LANES = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
WEYL_A, WEYL_B = np.uint32(WEYL[0]), np.uint32(WEYL[1])
UNIT = np.float32(2.0**-24)


@inner
def rank(bits: int) -> np.uint32:
    """Return a uint32 that orders the int32 `bits` of float32 numbers by magnitude, the negative of two last."""
    return np.uint32(np.uint32(bits) << np.uint32(1) | np.uint32(bits) >> np.uint32(31))


@inner
def ordered(bits: int) -> np.int32:
    """Return an int32 that orders the int32 `bits` of float32 numbers as they are, NaN at the ends; its own inverse."""
    return np.int32(bits ^ (bits >> np.int32(31) & np.int32(0x7FFFFFFF)))


@inner
def find_extremes(places: np.ndarray, length: int, number: int, ranks: np.ndarray) -> None:
    """Write the greatest `rank` of each group of `length` into `ranks`, uint32.

    `places` are the addresses of the groups' float32 numbers, of which there are `number` in all.
    """
    for group in range(len(ranks)):
        numbers = array_at(places[group], length_of(group, length, number), np.float32)
        greatest = np.uint32(0)
        for i in range(len(numbers)):
            one = rank(as_bits(numbers[i]))
            greatest = one if one > greatest else greatest
        ranks[group] = greatest


@inner
def find_ends(places: np.ndarray, length: int, number: int, lows: np.ndarray, highs: np.ndarray) -> None:
    """Write the least and the greatest number of each group into `lows` and `highs`, float32; NaN if there is one.

    `places`: as for `find_extremes`.
    """
    for group in range(len(lows)):
        numbers = array_at(places[group], length_of(group, length, number), np.float32)
        low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
        for i in range(len(numbers)):
            key = ordered(as_bits(numbers[i]))
            low, high = key if key < low else low, key if key > high else high
        lows[group], highs[group] = as_float(ordered(low)), as_float(ordered(high))


@inner
def length_of(group: int, length: int, number: int) -> int:
    """Return how many of so many numbers are in this group: the last may be shorter."""
    return min(length, number - group * length)


@inner
def half_of(bits: int) -> np.float32:
    """Return half of how many codes of so many bits there are, as float32."""
    return np.float32(8) if bits == 4 else np.float32(128)


@inner
def fit_symmetric(bits: int, method: int, ranks: np.ndarray, scales: np.ndarray, inverses: np.ndarray) -> None:
    """Write the scales of groups with these extremes, zero for what would be subnormal, and their reciprocals."""
    half = half_of(bits)
    for i in range(len(ranks)):
        extreme = as_float(np.int32(ranks[i] >> np.uint32(1) | ranks[i] << np.uint32(31)))
        scale = normal(abs(extreme) / half if method == PAPER else extreme / -half)
        scales[i], inverses[i] = scale, reciprocal(scale)


@inner
def fit_asymmetric(
    bits: int, lows: np.ndarray, highs: np.ndarray, scales: np.ndarray, offsets: np.ndarray, inverses: np.ndarray
) -> None:
    """Write the scales and offsets of groups with these ends, and the scales' reciprocals."""
    half, step = half_of(bits), STEP_4 if bits == 4 else STEP_8
    largest = LARGEST / half
    for i in range(len(lows)):
        scale = (highs[i] / np.float32(2) - lows[i] / np.float32(2)) * step
        scale = normal(largest if largest < scale < np.float32(np.inf) else scale)
        scales[i], offsets[i], inverses[i] = scale, lows[i] + half * scale, reciprocal(scale)


@inner
def normal(scale: np.float32) -> np.float32:
    """Return the scale, or zero if it is subnormal."""
    return np.float32(0) if abs(scale) < SMALLEST else scale


@inner
def reciprocal(scale: np.float32) -> np.float32:
    """Return 1 / scale, and zero where the scale is zero, infinite or NaN."""
    return np.float32(1) / scale if np.float32(0) < abs(scale) < np.float32(np.inf) else np.float32(0)


@inner
def round_randomly(scaled: np.ndarray, start: int, seed: int, words: np.ndarray) -> None:
    """Round the numbers of elements start, start + 1, ... in place: down, or up with their fraction's probability.

    `words`: uint32 (4 * calls,), as room for the random numbers.
    """
    first, last = start // 4, (start + len(scaled) + 3) // 4
    philox(first, last, seed, words)
    drawn = array_at(words.ctypes.data + 4 * (start - 4 * first), len(scaled), np.uint32)
    for i in range(len(scaled)):
        floor = np.floor(scaled[i])
        uniform = np.float32(np.int32(drawn[i] >> np.uint32(8))) * UNIT
        scaled[i] = floor + np.float32(uniform < scaled[i] - floor)


@inner
def philox(first: int, last: int, seed: int, words: np.ndarray) -> None:
    """Write the four numbers of each of the calls first ... last into `words`: see `reference.philox`."""
    low, high = np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32 & 0xFFFFFFFF)
    for call in range(last - first):
        a, b = np.uint32((first + call) & 0xFFFFFFFF), np.uint32((first + call) >> 32)
        c = d = np.uint32(0)
        for turn in range(10):
            one, two = np.uint64(a) * LANES[0], np.uint64(c) * LANES[1]
            key_a, key_b = low + np.uint32(turn) * WEYL_A, high + np.uint32(turn) * WEYL_B
            a = np.uint32(two >> np.uint64(32) ^ b ^ key_a)
            c = np.uint32(one >> np.uint64(32) ^ d ^ key_b)
            b, d = np.uint32(two), np.uint32(one)
        words[4 * call], words[4 * call + 1], words[4 * call + 2], words[4 * call + 3] = a, b, c, d


@inner
def stored_code(number: float, bits: int) -> np.int32:
    """Return the nearest code of so many bits to a float32, halves to even, clipped and minus the least: int32."""
    least = LEAST_4 if bits == 4 else LEAST_8
    greatest = GREATEST_4 if bits == 4 else GREATEST_8
    code = as_bits(number + ROUNDER)
    code = least if code < least else code
    code = greatest if code > greatest else code
    return np.int32(code - least)


@inner
def round_to_nearest(bits: int, scaled: np.ndarray, codes: np.ndarray) -> None:
    """Write the nearest codes to float32 numbers into `codes`, int32."""
    for i in range(len(scaled)):
        codes[i] = stored_code(scaled[i], bits)


@inner
def pack(bits: int, codes: np.ndarray, target: int) -> None:
    """Write stored codes, int32, in so many bits each at an address.

    In 4 bits, the first of two is in the low half of a byte; if they are odd in number, the last byte's high half is
    zero.
    """
    count = len(codes)
    if bits == 4:
        pairs = array_at(codes.ctypes.data, count // 2, np.uint64)
        packed = array_at(target, (count + 1) // 2, np.uint8)
        for i in range(count // 2):
            packed[i] = np.uint8((pairs[i] | pairs[i] >> np.uint64(28)) & np.uint64(255))
        if count % 2:
            packed[count // 2] = np.uint8(codes[count - 1])
    else:
        packed = array_at(target, count, np.uint8)
        for i in range(count):
            packed[i] = np.uint8(codes[i])


@inner
def unpack(bits: int, codes: int, values: np.ndarray) -> None:
    """Write the codes of so many bits at an address into `values`, float32."""
    count = len(values)
    if bits == 4:
        packed = array_at(codes, (count + 1) // 2, np.uint8)
        for i in range(count // 2):
            values[2 * i], values[2 * i + 1] = from_low(packed[i]), from_high(packed[i])
        if count % 2:
            values[count - 1] = from_low(packed[count // 2])
    else:
        packed = array_at(codes, count, np.uint8)
        for i in range(count):
            values[i] = from_byte(packed[i])


@inner
def from_low(byte: int) -> np.float32:
    """Return the code in the low half of a byte, as float32."""
    return np.float32(np.uint8(byte & np.uint8(15))) - np.float32(8)


@inner
def from_high(byte: int) -> np.float32:
    """Return the code in the high half of a byte, as float32."""
    return np.float32(np.uint8(byte >> np.uint8(4))) - np.float32(8)


@inner
def from_byte(byte: int) -> np.float32:
    """Return the code of 8 bits in a byte, as float32."""
    return np.float32(byte) - np.float32(128)
