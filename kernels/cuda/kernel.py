"""What a compiled kernel is to those who launch it: a callable, got by name from the kernels of a device."""

from collections.abc import Callable
from typing import Protocol

Kernel = Callable[[int, int, tuple[int, ...]], None]


class Kernels(Protocol):
    """The compiled kernels of one device, by name."""

    def get(self, source: str, name: str) -> Kernel:
        """Return the kernel `name` of sources/`source`, called with (blocks, threads a block, arguments).

        An argument is 64 bits wide: a pointer or a number.
        """
