"""Count what the blocks' calls hold between forward and backward, in the steps that are looked at."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ds_adacc.call import Call
from ds_adacc.cells import UNPLANNED, Cell, Slot, ValueSlot


@dataclass(frozen=True)
class Held:
    """Bytes that the calls of one step held when its backward began: as planned for those very calls, and as seen."""

    planned: int
    observed: int


class Observation:
    """One step's count: calls alive at once by kind of block, and what is held when backward begins.

    `held_bytes` and `held_calls` (by kind) are of that moment; None and empty before it.
    """

    def __init__(self) -> None:
        self.most_alive: Counter[str] = Counter()
        self.held_bytes: int | None = None
        self.held_calls: Counter[str] = Counter()
        self._alive: Counter[str] = Counter()
        self._cells: weakref.WeakSet[Cell] = weakref.WeakSet()

    def watch(
        self, kind: str, call: Call, pack: Callable[[torch.Tensor], Slot]
    ) -> tuple[Callable[[torch.Tensor], Any], Callable[[], None]]:
        """The pack hook of `call` so wrapped that this observation sees it, and what to call after the forward."""
        ticket = _Ticket(self, kind)

        def watched(tensor: torch.Tensor) -> _WatchedSlot:
            slot = pack(tensor)
            if isinstance(slot, ValueSlot) and slot.cell.name == UNPLANNED:
                self._cells.add(slot.cell)
            return _WatchedSlot(slot, ticket)

        def done() -> None:
            values = call.plan.recording.values
            self._cells.update(cell for i, cell in call.cells.items() if values[i].owned)

        return watched, done

    def opened(self, kind: str) -> None:
        self._alive[kind] += 1
        self.most_alive[kind] = max(self.most_alive[kind], self._alive[kind])

    def closed(self, kind: str) -> None:
        self._alive[kind] -= 1

    def backward_begins(self) -> None:
        """Count the bytes of storage that cells hold, each storage once. Later calls do nothing."""
        if self.held_bytes is None:
            storages: dict[int, int] = {}
            for cell in self._cells:
                for tensor in cell.held():
                    storage = tensor.untyped_storage()
                    storages[storage._cdata] = storage.nbytes()
            self.held_bytes = sum(storages.values())
            self.held_calls = +self._alive


class _Ticket:
    """Lives as long as any slot of one call."""

    __slots__ = ("kind", "observation")

    def __init__(self, observation: Observation, kind: str) -> None:
        self.observation = observation
        self.kind = kind
        observation.opened(kind)

    def __del__(self) -> None:
        self.observation.closed(self.kind)


class _WatchedSlot:
    __slots__ = ("slot", "ticket")

    def __init__(self, slot: Slot, ticket: _Ticket) -> None:
        self.slot = slot
        self.ticket = ticket

    def unpack(self) -> torch.Tensor:
        self.ticket.observation.backward_begins()
        return self.slot.unpack()
