"""Tell memory that nobody has written to from what a kernel made: fill fresh memory with a pattern, and look for it.

A kernel may return memory that it does not write: flash-attn's random state, without dropout, or rows that no token
fills. It has other bits at each run, and backward does not read it. A replay on filled memory also proves that the
kernel writes all of the rest: otherwise it might find there what the first run has left.
"""

from __future__ import annotations

from typing import Any

import torch

from ds_adacc.program.dispatch_modes import BesideCompiled
from ds_adacc.program.refusals import is_of_torch
from ds_adacc.program.same_bits import as_bytes, pieces

PATTERNS = (0xA5, 0x5A)


class Filled(BesideCompiled):
    """Fills the memory that `empty` and its like return with bytes of this pattern."""

    def __init__(self, pattern: int) -> None:
        super().__init__()
        self._pattern = pattern

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a replay calls, and what the kernels of others than torch call in turn."""
        made = func(*args, **kwargs) if is_of_torch(func) else self.into_kernel(func, args, kwargs)
        if isinstance(made, torch.Tensor) and "empty" in str(func) and made.device.type != "meta":
            _bytes_of_storage(made).fill_(self._pattern)
        return made


def differs_only_where_unwritten(real: torch.Tensor, filled: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether the tensor and its replays, one for each pattern, have the same bits but where nothing was written."""
    if any(real.shape != each.shape or real.dtype != each.dtype for each in filled):
        return False
    return all(_explained(*map(as_bytes, parts)) for parts in pieces(*map(torch.Tensor.contiguous, (real, *filled))))


def shows_pattern(real: torch.Tensor) -> bool:
    """Whether an element is of the first pattern alone. An earlier replay may have left that in memory not written."""
    size = real.dtype.itemsize
    return any(bool((as_bytes(part).unflatten(0, (-1, size)) == PATTERNS[0]).all(-1).any()) for (part,) in pieces(real))


def _explained(exact: torch.Tensor, *replays: torch.Tensor) -> bool:
    same = (replays[0] == exact) & (replays[1] == exact)
    unwritten = (replays[0] == PATTERNS[0]) & (replays[1] == PATTERNS[1])
    return bool((same | unwritten).all())


def _bytes_of_storage(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
