"""Slots that may be exchanged: those of a call which is recorded before it has a plan, or which is probed."""

from __future__ import annotations

import weakref
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

    So what autograd saves for outputs that the block discards is freed then, as without ds_adacc.
    """

    def __init__(self) -> None:
        self._slots: list[weakref.ref[LateSlot]] = []

    def add(self, slot: Slot) -> LateSlot:
        late = LateSlot(slot)
        self._slots.append(weakref.ref(late))
        return late

    def close(self) -> tuple[list[LateSlot], frozenset[int]]:
        """The slots, and the positions of those that autograd has discarded: these now hold an empty tensor.

        The forward has ended, and what the block has returned is alive.
        """
        slots, self._slots = [slot() for slot in self._slots], []
        discarded = frozenset(number for number, slot in enumerate(slots) if slot is None)
        return [slot or LateSlot(keep(torch.empty(0))) for slot in slots], discarded
