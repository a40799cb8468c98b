"""Casts of parameters, which autocast makes at their first use and keeps until its context ends.

A call that finds a cast there runs one operator less than the call that made it. Both are to have one program. So a
cast counts as an operator of every call that reads it, in the place where the call first does, or first saves it.

What autocast keeps: `cached_cast` in aten/src/ATen/autocast_mode.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ds_adacc.program.functions import autocast_now
from ds_adacc.program.pieces import pieces, same_bits
from ds_adacc.program.schema import tensors_in
from ds_adacc.record.known import Known, storage_of

CAST = torch.ops.aten._to_copy.default


class Casts:
    """The casts that autocast keeps where the block is called, as far as the block has not read them yet."""

    def __init__(self) -> None:
        keeps = torch.is_autocast_cache_enabled()
        self._kinds = {(device, dtype) for device, is_on, dtype in autocast_now() if is_on and keeps}
        self._unread: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by storage: what is cast, and the cast

    def makes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call makes a cast that autocast keeps."""
        return func is CAST and kwargs.keys() == {"dtype"} and self._is_kept(args[0], kwargs["dtype"])

    def add(self, leaf: torch.Tensor, cast: torch.Tensor) -> torch.Tensor:
        """Have `read` tell of a cast that was made. Returns the cast."""
        self._unread[storage_of(cast)] = leaf, cast
        return cast

    def read(self, given: Any, known: Known) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What was cast, and the cast, for each tensor in `given` that is a cast and is read for the first time."""
        if not self._kinds:
            return
        for tensor in tensors_in(given):
            made = self._unread.pop(storage_of(tensor), None) or self._made_before(tensor, known)
            if made is not None:
                yield made

    def _is_kept(self, leaf: torch.Tensor, dtype: torch.dtype) -> bool:
        is_kept = leaf.requires_grad and leaf.is_leaf and leaf.dtype is torch.float32 and not leaf._is_view()
        return is_kept and (leaf.device.type, dtype) in self._kinds

    def _made_before(self, tensor: torch.Tensor, known: Known) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The same for a cast that an earlier call has made: its node in the autograd graph tells what was cast."""
        node = tensor.grad_fn
        if node is None or node.name() != "ToCopyBackward0":
            return None
        leaf = getattr(node.next_functions[0][0], "variable", None)
        if leaf is None or not self._is_kept(leaf, tensor.dtype) or known.find(tensor) is not None:
            return None
        with torch.no_grad():  # if the leaf has changed since, the cast can be made of it no more
            parts = pieces(leaf.detach(), tensor.detach())
            is_same = leaf.shape == tensor.shape and all(same_bits(one.to(tensor.dtype), other) for one, other in parts)
        return (leaf, tensor) if is_same else None
