"""Kernels for a group a channel and run of rows: "channel"."""

import numpy as np

from .compiling import inner, kernel
from .memory import array_at, as_bits, loaded, storable, store
from .quantize import (
    NEAREST,
    fit_symmetric,
    from_byte,
    from_high,
    from_low,
    pack,
    rank,
    round_randomly,
    round_to_nearest,
    stored_code,
    unpack,
)

BLOCK = 1024  # elements at a time, so that they stay in the L1 cache
STRIP = 512  # channels at a time, so that a run of them stays in the L2 cache from the fit to the rounding


def strip_of(channels: int) -> int:
    """Return how many channels a strip has: all, if odd in number, since in INT4 a byte may then belong to two rows."""
    return channels if channels % 2 or channels <= STRIP else STRIP


def block_elements(channels: int) -> int:
    """Return how many elements a block has at most."""
    strip = strip_of(channels)
    return rows_at_once(strip, channels) * strip


def rows_at_once(strip: int, channels: int) -> int:
    """Return how many rows make a block: an even number of neighbours, or one row of a strip."""
    return max(2, BLOCK // max(strip, 1) // 2 * 2) if strip == channels else 1


compiled_rows_at_once = inner(rows_at_once)


@kernel
def compress_channels(
    first: int,
    last: int,
    kind: int,
    source: int,
    rows: int,
    channels: int,
    length: int,
    strip: int,
    bits: int,
    method: int,
    seed: int,
    codes: int,
    scales: int,
) -> None:
    """Compress tiles first ... last of the tensor (rows, channels) at `source` to the payload's addresses.

    A tile is a run of `length` rows by `strip` channels; those of a run are neighbours. Codes have so many `bits`.
    """
    strips = (channels + strip - 1) // strip
    step = compiled_rows_at_once(strip, channels)
    room = step * strip
    buffer = np.empty(2 * room, np.float32)  # the numbers, and then their codes
    words, spare = np.empty(0 if seed == NEAREST else room + 8, np.uint32), np.empty(2 * strip, np.float32)
    for tile in range(first, last):
        run, left = tile // strips, tile % strips * strip
        width, top, bottom = min(strip, channels - left), run * length, min(run * length + length, rows)
        ranks = array_at(spare.ctypes.data, width, np.uint32)
        inverses = array_at(spare.ctypes.data + 4 * strip, width, np.float32)
        for i in range(width):
            ranks[i] = 0
        for row in range(top, bottom, step):
            block = loaded(kind, source, row * channels + left, min(step, bottom - row) * width, buffer)
            greatest(block, ranks)
        fitted = array_at(scales + 4 * (run * channels + left), width, np.float32)
        fit_symmetric(bits, method, ranks, fitted, inverses)
        for row in range(top, bottom, step):
            start = row * channels + left
            block = loaded(kind, source, start, min(step, bottom - row) * width, buffer)
            rounded = array_at(buffer.ctypes.data + 4 * room, len(block), np.int32)
            if seed == NEAREST:
                round_rows(bits, block, inverses, rounded)
            else:
                scaled = array_at(buffer.ctypes.data, len(block), np.float32)
                multiply(block, inverses, scaled)
                round_randomly(scaled, start, seed, words)
                round_to_nearest(bits, scaled, rounded)
            pack(bits, rounded, codes + start * bits // 8)


@inner
def greatest(block: np.ndarray, ranks: np.ndarray) -> None:
    """Raise `ranks`, uint32 (channels,), to those of the rows in `block`, float32 (rows * channels,)."""
    width = len(ranks)
    for begin in range(0, len(block), width):
        row = array_at(block.ctypes.data + 4 * begin, width, np.float32)
        for i in range(width):
            one = rank(as_bits(row[i]))
            ranks[i] = one if one > ranks[i] else ranks[i]


@inner
def round_rows(bits: int, block: np.ndarray, inverses: np.ndarray, codes: np.ndarray) -> None:
    """Write the nearest codes to the numbers of `block`, (rows * channels,), into `codes`, int32."""
    width = len(inverses)
    for begin in range(0, len(block), width):
        row = array_at(block.ctypes.data + 4 * begin, width, np.float32)
        rounded = array_at(codes.ctypes.data + 4 * begin, width, np.int32)
        for i in range(width):
            rounded[i] = stored_code(row[i] * inverses[i], bits)


@inner
def multiply(block: np.ndarray, factors: np.ndarray, products: np.ndarray) -> None:
    """Multiply each row of `block`, (rows * channels,), by `factors`, (channels,)."""
    width = len(factors)
    for begin in range(0, len(block), width):
        row = array_at(block.ctypes.data + 4 * begin, width, np.float32)
        product = array_at(products.ctypes.data + 4 * begin, width, np.float32)
        for i in range(width):
            product[i] = row[i] * factors[i]


@kernel
def decompress_channels(
    first: int,
    last: int,
    kind: int,
    target: int,
    rows: int,
    channels: int,
    length: int,
    strip: int,
    bits: int,
    codes: int,
    scales: int,
) -> None:
    """Decompress tiles first ... last, as cut by `compress_channels`, to the tensor at `target`."""
    strips = (channels + strip - 1) // strip
    step = compiled_rows_at_once(strip, channels)
    buffer = np.empty(step * strip, np.float32)
    for tile in range(first, last):
        run, left = tile // strips, tile % strips * strip
        width, top, bottom = min(strip, channels - left), run * length, min(run * length + length, rows)
        fitted = array_at(scales + 4 * (run * channels + left), width, np.float32)
        for row in range(top, bottom, step):
            start = row * channels + left
            number = min(step, bottom - row) * width
            block = storable(kind, target, start, number, buffer)
            if bits == 4 and width % 2:  # a byte may belong to two rows
                unpack(bits, codes + start // 2, block)
                multiply(block, fitted, block)
            else:
                restore_rows(bits, codes + start * bits // 8, fitted, block)
            store(kind, target, start, number, block)


@inner
def restore_rows(bits: int, codes: int, scales: np.ndarray, block: np.ndarray) -> None:
    """Write the numbers that codes at an address stand for into `block`, float32 (rows * channels,).

    In 4 bits, the channels are even in number: no byte belongs to two rows.
    """
    width = len(scales)
    for begin in range(0, len(block), width):
        row = array_at(block.ctypes.data + 4 * begin, width, np.float32)
        if bits == 4:
            packed = array_at(codes + begin // 2, width // 2, np.uint8)
            for i in range(width // 2):
                row[2 * i] = from_low(packed[i]) * scales[2 * i]
                row[2 * i + 1] = from_high(packed[i]) * scales[2 * i + 1]
        else:
            packed = array_at(codes + begin, width, np.uint8)
            for i in range(width):
                row[i] = from_byte(packed[i]) * scales[i]
