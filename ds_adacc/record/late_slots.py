"""Slots that may be exchanged: those of a call which is recorded before it has a plan, or which is probed."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ds_adacc.program.slots import Slot, keep


class LateSlot:
    """A slot whose own slot may be exchanged."""

    __slots__ = ("__weakref__", "slot")

    def __init__(self, slot: Slot | Any) -> None:
        self.slot = slot

    def unpack(self) -> torch.Tensor:
        return self.slot.unpack()


class LateSlots:
    """The slots of one call, in the order of the pack hook. Until the forward has ended, autograd alone holds them.

    So what autograd saves for outputs that the block discards is freed when it would be without ds_adacc. `ops`: the
    operators that have run so far, a list that grows.
    """

    def __init__(self, ops: Sequence[Any]) -> None:
        self._ops = ops
        self._slots: list[weakref.ref[LateSlot]] = []
        self._discarded: dict[int, int] = {}

    def keep(self, tensor: torch.Tensor) -> LateSlot:
        """A slot that retains the tensor until it is exchanged."""
        late, number = LateSlot(keep(tensor)), len(self._slots)
        self._slots.append(weakref.ref(late, lambda _: self._discarded.update({number: len(self._ops)})))
        return late

    def close(self) -> tuple[list[LateSlot], Mapping[int, int]]:
        """The slots, and those that autograd has discarded, which now hold an empty tensor.

        Of each discarded one the position, and how many operators had run by then. The forward has ended, and what the
        block has returned is alive.
        """
        slots, self._slots, self._ops = [slot() for slot in self._slots], [], ()
        return [slot or LateSlot(keep(torch.empty(0))) for slot in slots], self._discarded
