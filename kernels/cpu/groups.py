"""Kernels for groups of neighbours in memory: "group", "token", "asymmetric" and "outlier"."""

import numpy as np

from .compiling import inner, kernel
from .memory import array_at, load, store
from .quantize import (
    ASYMMETRIC,
    NEAREST,
    find_ends,
    find_extremes,
    fit_asymmetric,
    fit_symmetric,
    pack,
    part,
    round_randomly,
    unpack,
)

BLOCK = 2048  # elements that are in the L1 cache at a time


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
    buffer, words = np.empty(room, np.float32), np.empty(0 if seed == NEAREST else room + 8, np.uint32)
    spare = np.empty(3 * step, np.float32)
    for group in range(first, last, step):
        start, count = group * length, min(step, last - group)
        block = array_at(buffer.ctypes.data, min(count * length, elements - start), np.float32)
        load(kind, source, start, len(block), block)
        if capacity:
            separate(kind, source, start, block, width, outliers, capacity, raw)
        fitted = array_at(scales + 4 * group, count, np.float32)
        if method == ASYMMETRIC:
            ends = array_at(offsets + 4 * group, count, np.float32)
            scale_asymmetric(block, length, bits, fitted, ends, spare.ctypes.data)
        else:
            scale_symmetric(block, length, bits, method, fitted, spare.ctypes.data)
        if seed != NEAREST:
            round_randomly(block, start, seed, words)
        pack(bits, block, codes + start * bits // 8)


@inner
def scale_symmetric(block: np.ndarray, length: int, bits: int, method: int, scales: np.ndarray, room: int) -> None:
    """Write the scales of the groups in a block, and bring its numbers to the scale of codes.

    `room`: the address of float32 (3 * groups,), to compute in.
    """
    count = len(scales)
    ranks = array_at(room, count, np.uint32)
    inverses = array_at(room + 4 * count, count, np.float32)
    find_extremes(block, length, ranks)
    fit_symmetric(bits, method, ranks, scales, inverses)
    for group in range(len(scales)):
        numbers, inverse = part(block, group, length), inverses[group]
        for i in range(len(numbers)):
            numbers[i] *= inverse


@inner
def scale_asymmetric(
    block: np.ndarray, length: int, bits: int, scales: np.ndarray, offsets: np.ndarray, room: int
) -> None:
    """Write the scales and offsets of the groups in a block, and bring its numbers to the scale of codes.

    `room`: the address of float32 (3 * groups,), to compute in.
    """
    count = len(scales)
    lows, highs = array_at(room, count, np.float32), array_at(room + 4 * count, count, np.float32)
    inverses = array_at(room + 8 * count, count, np.float32)
    find_ends(block, length, lows, highs)
    fit_asymmetric(bits, lows, highs, scales, offsets, inverses)
    for group in range(len(scales)):
        numbers, offset, inverse = part(block, group, length), offsets[group], inverses[group]
        for i in range(len(numbers)):
            numbers[i] = (numbers[i] - offset) * inverse


@inner
def separate(
    kind: int, source: int, start: int, block: np.ndarray, width: int, outliers: int, capacity: int, raw: int
) -> None:
    """Copy the outlier channels of the block that begins at element `start` to `raw`, and set them to zero."""
    channels = array_at(outliers, capacity, np.int64)
    for row in range(start // width, (start + len(block) - 1) // width + 1):
        for k in range(capacity):
            element = row * width + channels[k]
            if start <= element < start + len(block):
                copy_element(kind, source, element, raw, row * capacity + k)
                block[element - start] = 0


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
        block = array_at(buffer.ctypes.data, min(count * length, elements - start), np.float32)
        unpack(bits, codes + start * bits // 8, block)
        fitted = array_at(scales + 4 * group, count, np.float32)
        if offsets:
            restore_asymmetric(block, length, fitted, array_at(offsets + 4 * group, count, np.float32))
        else:
            restore_symmetric(block, length, fitted)
        store(kind, target, start, len(block), block)
        if capacity:
            rejoin(kind, target, start, start + len(block), width, outliers, capacity, raw)


@inner
def restore_symmetric(block: np.ndarray, length: int, scales: np.ndarray) -> None:
    """Turn the codes in a block of groups into the numbers they stand for."""
    for group in range(len(scales)):
        numbers, scale = part(block, group, length), scales[group]
        for i in range(len(numbers)):
            numbers[i] *= scale


@inner
def restore_asymmetric(block: np.ndarray, length: int, scales: np.ndarray, offsets: np.ndarray) -> None:
    """Turn the codes in a block of groups into the numbers they stand for; the product is rounded."""
    for group in range(len(scales)):
        numbers, scale, offset = part(block, group, length), scales[group], offsets[group]
        for i in range(len(numbers)):
            numbers[i] = numbers[i] * scale + offset


@inner
def rejoin(kind: int, target: int, start: int, stop: int, width: int, outliers: int, capacity: int, raw: int) -> None:
    """Copy the outlier channels of elements start ... stop from `raw`."""
    channels = array_at(outliers, capacity, np.int64)
    for row in range(start // width, (stop - 1) // width + 1):
        for k in range(capacity):
            element = row * width + channels[k]
            if start <= element < stop:
                copy_element(kind, raw, row * capacity + k, target, element)
