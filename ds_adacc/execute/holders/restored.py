"""What compressed and offloaded values share: they are restored when backward asks for them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from ds_adacc.program.geometry import Geometry


class Restored(ABC):
    """A value held in another form. It is restored at its first use and cached until its last (Rule 6)."""

    __slots__ = ("__weakref__", "_cached", "_left", "geometry", "name", "uses")

    def __init__(self, name: str, geometry: Geometry, uses: int) -> None:
        self.name = name
        self.geometry = geometry
        self.uses = self._left = uses
        self._cached: torch.Tensor | None = None

    def get(self) -> torch.Tensor:
        root = self._cached
        if root is None:
            root = self._cached = self._restore().as_strided(self.geometry.size, self.geometry.stride)
        self._left -= 1
        if self._left <= 0:
            self._cached, self._left = None, self.uses
        return root

    def unpack(self) -> torch.Tensor:
        return self.get()

    @abstractmethod
    def _restore(self) -> torch.Tensor:
        """All elements, flat, in memory order. Raises RuntimeError if the value was never saved."""
