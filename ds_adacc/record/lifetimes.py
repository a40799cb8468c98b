"""Until when the program keeps in forward what the operators of a block return.

A Python variable may keep a tensor long after its last reader has run. Whatever a plan does with it, it is alive then
(Rule R23).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ds_adacc.program.arguments import tensors_in
from ds_adacc.program.geometry import storage_of, why_not_plain


class _Life:
    """Of a storage: how many tensors of the program's lie in it, and how many operators had run when the last one died.

    The recorder's own aliases are no tensors of the program's. It holds neither the recorder nor any tensor.
    """

    __slots__ = ("_ops", "ended", "tensors")

    def __init__(self, ops: Sequence[Any]) -> None:
        self._ops = ops
        self.tensors = self.ended = 0

    def note_death(self, _: object) -> None:
        """A tensor of the program's has died."""
        self.tensors -= 1
        self.ended = len(self._ops)


class Lifetimes:
    """The lives of the storages that operators return. `ops`: the operators so far, a list that grows."""

    def __init__(self, ops: Sequence[Any]) -> None:
        self._ops = ops
        self._lives: dict[int, _Life] = {}  # by storage
        self._refs: list[weakref.ref[torch.Tensor]] = []

    def note(self, result: Any) -> None:
        """Note what an operator hands to the program: torch gives it these very objects."""
        for tensor in tensors_in(result):
            if why_not_plain(tensor) is None:
                life = self._lives.setdefault(storage_of(tensor), _Life(self._ops))
                life.tensors += 1
                self._refs.append(weakref.ref(tensor, life.note_death))

    def alive_until(self, storage: int) -> int:
        """The last operator to run while the program keeps a tensor in this storage; -1 if that was not seen."""
        life = self._lives.get(storage)
        if life is None:
            return -1
        return (len(self._ops) if life.tensors else life.ended) - 1
