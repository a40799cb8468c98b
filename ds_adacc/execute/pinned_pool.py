"""Pinned host memory that one copy after another uses: getting it from the system takes milliseconds.

Torch has a cache of pinned memory too, but it reuses a block only after the host has seen its last copy end. The host
runs far ahead of the device, so that cache would grow. Here a buffer comes back at once, with the event after which it
may be written to: the next copy into it waits for that event on the device.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

import torch

Event = torch.Event | torch.cuda.Event  # which of the two a stream records is torch's affair


class Buffer(NamedTuple):
    """Pinned memory, uint8 (2^n,). It may be written to after the event `free`; None: at once."""

    memory: torch.Tensor
    free: Event | None = None


class PinnedPool:
    """Buffers by size. Sizes are powers of two, as those of torch's own cache of pinned memory are.

    Backward's threads give buffers back while forward takes some: each call of a deque is atomic.
    """

    def __init__(self) -> None:
        self._free: dict[int, deque[Buffer]] = {}
        self._made: Counter[int] = Counter()

    def reserve(self, sizes: Iterable[int]) -> None:
        """Have room for tensors of these bytes at once; give up what is free beyond that.

        Torch's cache keeps what is given up, for buffers of the same size.

        Raises RuntimeError with the bytes if there is no room.
        """
        wanted = Counter(map(_rounded, sizes))
        for size in {*self._free, *wanted}:
            free = self._free.setdefault(size, deque())
            while self._made[size] > wanted[size] and free:
                free.popleft()
                self._made[size] -= 1
            while self._made[size] < wanted[size]:
                free.append(self._make(size))

    def take(self, nbytes: int) -> Buffer:
        """A buffer with room for `nbytes`. Raises RuntimeError with the bytes if there is none and no room for one."""
        size = _rounded(nbytes)
        try:
            return self._free.setdefault(size, deque()).popleft()
        except IndexError:
            return self._make(size)

    def give(self, buffer: Buffer) -> None:
        """Take back a buffer that nobody writes to any more."""
        self._free[buffer.memory.numel()].append(buffer)

    def _make(self, size: int) -> Buffer:
        buffer = Buffer(pinned(size))
        self._made[size] += 1
        return buffer


def pinned(nbytes: int) -> torch.Tensor:
    """Pinned host memory, uint8 (`nbytes`,). Raises RuntimeError with the bytes if there is no room."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        text = (
            f"cannot get {nbytes} bytes of pinned host memory to offload a value to: {error}; free host memory, "
            "or set adacc.offload to false"
        )
        raise RuntimeError(text) from error


def _rounded(nbytes: int) -> int:
    return 1 << max(nbytes - 1, 0).bit_length()
