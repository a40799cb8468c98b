"""What compressed and offloaded values share: they are restored when backward asks for them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from ds_adacc.program.geometry import Geometry
from ds_adacc.program.slots import Holder


@dataclass(frozen=True)
class ValueFacts:
    """What is known of a value before the call. `uses`: how often backward asks for it."""

    name: str
    geometry: Geometry
    uses: int


OwnFacts = TypeVar("OwnFacts", bound=ValueFacts)


class Restored(Holder, Generic[OwnFacts]):
    """A value held in another form. It is restored at its first use and cached until its last (Rule E6)."""

    __slots__ = ("_cached", "_left", "facts")

    def __init__(self, facts: OwnFacts) -> None:
        self.facts = facts
        self._cached: torch.Tensor | None = None
        self._left = facts.uses

    def get(self) -> torch.Tensor:
        root = self._cached
        if root is None:
            root = self._cached = self.facts.geometry.view(self._restore())
        self._left -= 1
        if self._left <= 0:
            self._cached, self._left = None, self.facts.uses
        return root

    unpack = get

    @abstractmethod
    def _restore(self) -> torch.Tensor:
        """All elements in memory order. Raises RuntimeError if the value was never saved."""
