"""What the holders share that keep a value in another form than its own."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from ds_adacc.record.geometry import Geometry


class Restored(ABC):
    """A value kept in another form: restored on first use, as a flat tensor, and cached until its last."""

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

    @abstractmethod
    def _restore(self) -> torch.Tensor:
        """All elements, in the order in which they lie in memory. Raises RuntimeError if the cell is empty."""
