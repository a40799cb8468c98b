"""Cut a tensor into tiles of whole groups that stay in the processor's cache."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

CHUNK = 1 << 18  # elements; 1 MiB of float32 is the fastest where a core has 1 MiB of L2


class Block(NamedTuple):
    """Neighbours in memory, seen as an array (runs, length, channels).

    A quantization group is the `length` numbers of one run and one channel.
    """

    runs: int
    length: int
    channels: int


class Tile(NamedTuple):
    """Part of a block: where its elements and groups lie in the tensor's flat arrays."""

    elements: slice
    groups: slice
    shape: Block


def blocks(rows: int, length: int, channels: int) -> list[Block]:
    """Cut `rows` rows of `channels` numbers into runs of `length` rows.

    What is left over is a block of its own: a shorter run, whose scale no padding distorts.
    """
    if rows * channels == 0:
        return []
    full, tail = divmod(rows, length)
    cut = Block(full, length, channels), Block(1, tail, channels)
    return [block for block in cut if block.runs * block.length]


def tiles(blocks: Iterable[Block]) -> Iterator[Tile]:
    """Yield the tiles of consecutive blocks: of about CHUNK elements, and of at least one run.

    Two INT4 codes share a byte, so every tile but the last must have an even number of elements, and so must every
    block but the last.
    """
    element = group = 0
    for runs, length, channels in blocks:
        size = length * channels
        step = max(1, CHUNK // size)
        step += step * size % 2
        for run in range(0, runs, step):
            shape = Block(min(step, runs - run), length, channels)
            end, last = element + shape.runs * size, group + shape.runs * channels
            yield Tile(slice(element, end), slice(group, last), shape)
            element, group = end, last
