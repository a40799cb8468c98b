"""Compress: hold a codec's payload."""

from __future__ import annotations

import torch

from ds_adacc.execute.holders.restored import Restored
from ds_adacc.kernels import Codec
from ds_adacc.program.geometry import Geometry
from ds_adacc.program.saved import never_saved


class Compressed(Restored):
    """A value kept as a codec's payload."""

    __slots__ = ("_device", "codec", "payload", "rows")

    def __init__(self, name: str, codec: Codec, geometry: Geometry, rows: tuple[int, int], uses: int) -> None:
        super().__init__(name, geometry, uses)
        self.codec = codec
        self.rows = rows
        self.payload: tuple[torch.Tensor, ...] | None = None
        self._device: torch.device | None = None

    def fill(self, root: torch.Tensor) -> None:
        self._device = root.device
        flat = root.as_strided(self.rows, (self.rows[1], 1))
        self.payload = self.codec.compress(flat)

    def held(self) -> tuple[torch.Tensor, ...]:
        """The payload's tensors on the value's device."""
        return tuple(tensor for tensor in self.payload or () if tensor.device == self._device)

    def _restore(self) -> torch.Tensor:
        if self.payload is None:
            raise never_saved(self.name)
        return self.codec.decompress(self.payload, torch.Size(self.rows), self.geometry.dtype)
