"""Compress: hold a codec's payload."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_adacc.execute.holders.restored import Restored, ValueFacts
from ds_adacc.kernels import Codec
from ds_adacc.program.slots import Retained, never_saved


@dataclass(frozen=True)
class Compression(ValueFacts):
    """What is known of a compressed value. `shape`: the one that its codec restores; `device`: the type of its own."""

    codec: Codec
    shape: tuple[int, ...]
    device: str


class Compressed(Restored[Compression]):
    """A value kept as a codec's payload.

    Rule R17: what a graph of torch.compile saves is held in `pending`, until it is known that it is the recorded graph.
    """

    __slots__ = ("payload", "pending")

    def __init__(self, facts: Compression) -> None:
        super().__init__(facts)
        self.payload: tuple[torch.Tensor, ...] | None = None
        self.pending: Retained | None = None

    def fill(self, flat: torch.Tensor) -> None:
        """`flat`: the value's elements in memory order, contiguous, with its channels as the last dimension.

        It may be part of the autograd graph: no codec keeps it, and the pack hook is called with gradients off.
        """
        self.payload = self.facts.codec.compress(flat)

    def hold(self, flat: torch.Tensor) -> None:
        """Keep it as it is until `release`. Of `flat`, as of `fill`, but no part of the autograd graph."""
        self.pending = Retained.of(self.facts.name, flat)

    def release(self) -> None:
        """Compress what is held as it is, unless it was written to: then it stays, and backward raises an error."""
        flat = None if self.pending is None else self.pending.unchanged()
        if flat is not None:
            self.fill(flat)
            self.pending = None

    def held(self) -> tuple[torch.Tensor, ...]:
        """The payload's tensors on the value's device."""
        if self.pending is not None:
            return self.pending.held()
        return tuple(tensor for tensor in self.payload or () if tensor.device.type == self.facts.device)

    def _restore(self) -> torch.Tensor:
        if self.pending is not None:
            return self.pending.get()
        if self.payload is None:
            raise never_saved(self.facts.name)
        return self.decompressed(self.payload)

    def decompressed(self, payload: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """What the payload was compressed from, all elements in memory order."""
        return self.facts.codec.decompress(payload, self.facts.shape, self.facts.geometry.dtype)
