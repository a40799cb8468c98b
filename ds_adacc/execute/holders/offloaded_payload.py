"""Compress and offload: hold a copy of a codec's payload in host memory."""

from __future__ import annotations

import torch

from ds_adacc.execute.holders.compressed import Compressed, Compression
from ds_adacc.execute.host_offload import Offloads


class OffloadedPayload(Compressed):
    """A compressed value whose payload waits in host memory. When it is back, it goes with the decompression."""

    __slots__ = ("_copy",)

    def __init__(self, facts: Compression, offloads: Offloads) -> None:
        super().__init__(facts)
        self._copy = offloads.open()

    def fill(self, flat: torch.Tensor) -> None:
        self._copy.start(self.facts.codec.compress(flat))

    def _restore(self) -> torch.Tensor:
        if self.pending is not None or not self._copy.is_started:
            return super()._restore()
        return self.decompressed(self._copy.take())
