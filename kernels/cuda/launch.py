"""What a codec launches, worked out once for each shape, dtype and device."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..codec import Codec
from .kernel import Kernel, Kernels

SUFFIX = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
UNIT_BYTES = 16  # what one access moves: Unit in common.cuh


class Launch(NamedTuple):
    """A kernel with all its arguments but the pointers. With 0 blocks nothing is launched."""

    kernel: Kernel
    blocks: int
    threads: int
    numbers: tuple[int, ...]

    def __call__(self, *pointers: int) -> None:
        if self.blocks:
            self.kernel(self.blocks, self.threads, pointers + self.numbers)


class Launching(Codec):
    """A codec without a workspace, which works out its launches once for each shape, dtype and device."""

    LIMIT = 256  # keys; launches of shapes that never come back must not pile up
    _make_launches: Callable[..., Any]

    def __init__(self, *args: Any, kernels: Kernels | None = None) -> None:
        super().__init__(*args)
        self._kernels = kernels
        self._known: dict[tuple, Any] = {}

    def workspace_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        self._check(dtype)
        return 0

    def _launches(self, *key: Any) -> Any:
        """Return `self._make_launches(*key)`, where the key is (shape, dtype, device, ...)."""
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= self.LIMIT:
                self._known.clear()
            found = self._known[key] = self._make_launches(*key)
        return found

    def _kernels_on(self, device: torch.device) -> Kernels:
        """Return the kernels given to the codec, or those of the device."""
        return self._kernels or kernels_of(device)


def kernels_of(device: torch.device) -> Kernels:
    """Return the kernels of a CUDA device; raises ValueError for another one."""
    if device.type != "cuda":
        raise ValueError(f"the backend 'cuda' takes tensors on a CUDA device; got one on {device}")
    from .compiler import device_kernels

    return device_kernels(device.index)


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int, least: int, most: int) -> int:
    """Return the smallest power of two that is at least `n`, kept between two powers of two."""
    return min(most, max(least, 1 << max(0, n - 1).bit_length()))


def wide_reciprocal(divisor: int) -> int:
    """Return (2^64 - 1) / divisor, rounded down, for `divide` in common.cuh: an argument, so a signed number.

    Of an empty tensor, whose kernels are not launched, the divisor may be 0.
    """
    quotient = ((1 << 64) - 1) // max(1, divisor)
    return quotient - (1 << 64) if quotient >> 63 else quotient
