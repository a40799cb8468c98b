"""Kernels for groups of neighbours in memory: "group", "token", "asymmetric" and "outlier"."""

import numpy as np

from .compiling import inner, kernel
from .memory import array_at, loaded, storable, store
from .quantize import (
    ASYMMETRIC,
    NEAREST,
    find_ends,
    find_extremes,
    fit_asymmetric,
    fit_symmetric,
    from_byte,
    from_high,
    from_low,
    length_of,
    pack,
    round_randomly,
    round_to_nearest,
    stored_code,
    unpack,
)

BLOCK = 1024  # elements that are in the L1 cache at a time, as numbers and as codes
BYTES_A_GROUP = 3 * 4 + 8  # of room for what is computed of each group, and for the address of its numbers


def block_groups(length: int) -> int:
    """Return how many groups make a block: an even number, so that it has whole bytes."""
    return max(2, BLOCK // length // 2 * 2)


def block_elements(length: int, elements: int) -> int:
    """Return how many elements a block has, at most, in a tensor of so many."""
    return min(block_groups(length) * length, elements)


compiled_block_groups = inner(block_groups)


@kernel
def compress_groups(
    first: int,
    last: int,
    kind: int,
    source: int,
    elements: int,
    length: int,
    bits: int,
    method: int,
    seed: int,
    codes: int,
    scales: int,
    offsets: int,
    width: int,
    outliers: int,
    capacity: int,
    raw: int,
) -> None:
    """Compress groups first ... last, `first` even, of the tensor of so many `elements` at `source`; codes have `bits`.

    The other addresses are those of the payload: `offsets` are written if the method is ASYMMETRIC. The
    channels at `outliers`, int64 (capacity,), of `width` in all, go to `raw`.
    """
    step = compiled_block_groups(length)
    room = min(step * length, elements)
    buffer = np.empty(2 * room, np.float32)  # the numbers, and then their codes
    words = np.empty(0 if seed == NEAREST else room + 8, np.uint32)
    spare = np.empty(BYTES_A_GROUP * step, np.uint8)
    for group in range(first, last, step):
        start, count = group * length, min(step, last - group)
        number = min(count * length, elements - start)
        block = loaded(kind, source, start, number, buffer)
        places = array_at(spare.ctypes.data + 12 * step, count, np.int64)  # the addresses of the groups' numbers
        for i in range(count):
            places[i] = block.ctypes.data + 4 * i * length
        copies = array_at(buffer.ctypes.data, number, np.float32)  # the block itself, but for float32
        if capacity:
            separate(kind, source, start, length, places, copies, width, outliers, capacity, raw)
        fitted_scales = array_at(scales + 4 * group, count, np.float32)
        inverses = array_at(spare.ctypes.data, count, np.float32)
        # If there are no offsets, this is not read.
        fitted_offsets = array_at(offsets + 4 * group if offsets else 0, count, np.float32)
        fit_groups(
            bits, method, places, length, number, fitted_scales, fitted_offsets, inverses, spare.ctypes.data + 4 * step
        )
        rounded = array_at(buffer.ctypes.data + 4 * room, number, np.int32)
        if seed == NEAREST:
            round_groups(bits, method, places, length, fitted_offsets, inverses, rounded)
        else:
            scale_groups(method, places, length, fitted_offsets, inverses, copies)
            round_randomly(copies, start, seed, words)
            round_to_nearest(bits, copies, rounded)
        pack(bits, rounded, codes + start * bits // 8)


@inner
def fit_groups(
    bits: int,
    method: int,
    places: np.ndarray,
    length: int,
    number: int,
    scales: np.ndarray,
    offsets: np.ndarray,
    inverses: np.ndarray,
    room: int,
) -> None:
    """Write the scales of the groups whose `number` numbers lie at these addresses, and the scales' reciprocals.

    `offsets` are written if the method is ASYMMETRIC. `room`: the address of 4-byte numbers (2 * groups,).
    """
    count = len(places)
    if method == ASYMMETRIC:
        lows, highs = array_at(room, count, np.float32), array_at(room + 4 * count, count, np.float32)
        find_ends(places, length, number, lows, highs)
        fit_asymmetric(bits, lows, highs, scales, offsets, inverses)
    else:
        ranks = array_at(room, count, np.uint32)
        find_extremes(places, length, number, ranks)
        fit_symmetric(bits, method, ranks, scales, inverses)


@inner
def round_groups(
    bits: int,
    method: int,
    places: np.ndarray,
    length: int,
    offsets: np.ndarray,
    inverses: np.ndarray,
    codes: np.ndarray,
) -> None:
    """Write the nearest codes to the numbers of the groups at these addresses into `codes`, int32."""
    for group in range(len(places)):
        count = length_of(group, length, len(codes))
        numbers, inverse = array_at(places[group], count, np.float32), inverses[group]
        offset = offsets[group] if method == ASYMMETRIC else np.float32(0)
        rounded = array_at(codes.ctypes.data + 4 * group * length, count, np.int32)
        for i in range(count):
            rounded[i] = stored_code((numbers[i] - offset) * inverse, bits)


@inner
def scale_groups(
    method: int, places: np.ndarray, length: int, offsets: np.ndarray, inverses: np.ndarray, scaled: np.ndarray
) -> None:
    """Write the numbers of the groups at these addresses into `scaled`, float32, at the scale of codes."""
    for group in range(len(places)):
        count = length_of(group, length, len(scaled))
        numbers, inverse = array_at(places[group], count, np.float32), inverses[group]
        offset = offsets[group] if method == ASYMMETRIC else np.float32(0)
        products = array_at(scaled.ctypes.data + 4 * group * length, count, np.float32)
        for i in range(count):
            products[i] = (numbers[i] - offset) * inverse


@inner
def separate(
    kind: int,
    source: int,
    start: int,
    length: int,
    places: np.ndarray,
    copies: np.ndarray,
    width: int,
    outliers: int,
    capacity: int,
    raw: int,
) -> None:
    """Copy the outlier channels of the block that begins at element `start` to `raw`.

    The groups that have some are then read from `copies`, where these elements are zero.
    """
    channels = array_at(outliers, capacity, np.int64)
    for row in range(start // width, (start + len(copies) - 1) // width + 1):
        for k in range(capacity):
            element = row * width + channels[k]
            if start <= element < start + len(copies):
                copy_element(kind, source, element, raw, row * capacity + k)
                group = (element - start) // length
                place = copies.ctypes.data + 4 * group * length
                if places[group] != place:
                    copy_floats(places[group], place, length_of(group, length, len(copies)))
                    places[group] = place
                copies[element - start] = 0


@inner
def copy_floats(source: int, target: int, count: int) -> None:
    """Copy so many float32 numbers from one address to another."""
    numbers, copies = array_at(source, count, np.float32), array_at(target, count, np.float32)
    for i in range(count):
        copies[i] = numbers[i]


@inner
def copy_element(kind: int, source: int, index: int, target: int, place: int) -> None:
    """Copy element `index` of the tensor at `source` to element `place` of that at `target`."""
    if kind == 0:
        array_at(target, place + 1, np.uint32)[place] = array_at(source, index + 1, np.uint32)[index]
    else:
        array_at(target, place + 1, np.uint16)[place] = array_at(source, index + 1, np.uint16)[index]


@kernel
def decompress_groups(
    first: int,
    last: int,
    kind: int,
    target: int,
    elements: int,
    length: int,
    bits: int,
    codes: int,
    scales: int,
    offsets: int,
    width: int,
    outliers: int,
    capacity: int,
    raw: int,
) -> None:
    """Decompress groups first ... last, `first` even, to the tensor at `target`; `offsets` are absent if 0.

    `outliers` are int64 (capacity,).
    """
    step = compiled_block_groups(length)
    buffer = np.empty(min(step * length, elements), np.float32)
    for group in range(first, last, step):
        start, count = group * length, min(step, last - group)
        number = min(count * length, elements - start)
        block = storable(kind, target, start, number, buffer)
        fitted_scales = array_at(scales + 4 * group, count, np.float32)
        # If there are no offsets, this is not read.
        fitted_offsets = array_at(offsets + 4 * group if offsets else 0, count, np.float32)
        if bits == 4 and length % 2:  # a byte may belong to two groups, which are rows: they have no offsets
            unpack(bits, codes + start // 2, block)
            restore(block, length, fitted_scales)
        else:
            restore_codes(bits, codes + start * bits // 8, block, length, fitted_scales, fitted_offsets, offsets != 0)
        store(kind, target, start, number, block)
        if capacity:
            rejoin(kind, target, start, start + number, width, outliers, capacity, raw)


@inner
def part(block: np.ndarray, group: int, length: int) -> np.ndarray:
    """Return the numbers of a group in a block; the last may be shorter."""
    return array_at(block.ctypes.data + 4 * group * length, length_of(group, length, len(block)), np.float32)


@inner
def restore(block: np.ndarray, length: int, scales: np.ndarray) -> None:
    """Turn the codes in a block of groups, float32, into the numbers they stand for."""
    for group in range(len(scales)):
        numbers, scale = part(block, group, length), scales[group]
        for i in range(len(numbers)):
            numbers[i] *= scale


@inner
def restore_codes(
    bits: int,
    codes: int,
    block: np.ndarray,
    length: int,
    scales: np.ndarray,
    offsets: np.ndarray,
    has_offsets: bool,
) -> None:
    """Write the numbers that codes at an address stand for into a block; each group begins with a byte.

    The product of code and scale is rounded before an offset is added.
    """
    for group in range(len(scales)):
        numbers, scale = part(block, group, length), scales[group]
        offset = offsets[group] if has_offsets else np.float32(-0.0)  # which changes no number that it is added to
        packed = codes + group * length * bits // 8
        if bits == 8:
            restore_bytes(packed, numbers, scale, offset)
        else:
            restore_nibbles(packed, numbers, scale, offset)


@inner
def restore_bytes(codes: int, numbers: np.ndarray, scale: float, offset: float) -> None:
    """See `restore_codes`."""
    packed = array_at(codes, len(numbers), np.uint8)
    for i in range(len(numbers)):
        numbers[i] = from_byte(packed[i]) * scale + offset


@inner
def restore_nibbles(codes: int, numbers: np.ndarray, scale: float, offset: float) -> None:
    """See `restore_codes`."""
    pairs = len(numbers) // 2
    packed = array_at(codes, (len(numbers) + 1) // 2, np.uint8)
    for i in range(pairs):
        numbers[2 * i] = from_low(packed[i]) * scale + offset
        numbers[2 * i + 1] = from_high(packed[i]) * scale + offset
    if len(numbers) % 2:
        numbers[2 * pairs] = from_low(packed[pairs]) * scale + offset


@inner
def rejoin(kind: int, target: int, start: int, stop: int, width: int, outliers: int, capacity: int, raw: int) -> None:
    """Copy the outlier channels of elements start ... stop from `raw`."""
    channels = array_at(outliers, capacity, np.int64)
    for row in range(start // width, (stop - 1) // width + 1):
        for k in range(capacity):
            element = row * width + channels[k]
            if start <= element < stop:
                copy_element(kind, raw, row * capacity + k, target, element)
