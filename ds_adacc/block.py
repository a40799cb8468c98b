"""One block of the model and the records of its calls, one for each signature and set of Python numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from ds_adacc.plan import Plan
from ds_adacc.program import Op, Recording
from ds_adacc.reach import Guard

_RECORDS = 8
_DISTINCT_NUMBERS = 3


@dataclass
class Record:
    """What is known of one block under one signature.

    `plan` is None where the block could not be recorded: it then runs under plain autograd. `outliers` holds, for each
    value that the outlier codec may hold, the channels by falling Z-score and the count above the threshold, both
    on the device. `changes` counts how often each guarded number was found changed; those in `settled` are guarded no
    longer, and the operators in `volatile`, which follow them, are never replayed.
    """

    guards: tuple[Guard, ...] = ()
    kind: str = ""
    plan: Plan | None = None
    outliers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    changes: Counter[str] = field(default_factory=Counter)
    settled: frozenset[str] = frozenset()
    volatile: dict[int, str] = field(default_factory=dict)

    def holds(self) -> bool:
        return all(guard.holds() for guard in self.guards)

    def succeed(self, earlier: Record, old: Recording, new: Recording) -> None:
        """Learn from the earlier record of the same signature, one of whose numbers has changed.

        A number on a schedule would have the block recorded anew at every step. Once it has been seen with three
        values and only constants of the program differed, the operators that hold them are refused for replay and
        the number is guarded no longer.
        """
        differing = _differing_constants(old, new)
        if differing is None:
            return
        moved = {g.path for g in earlier.guards if not g.holds() and type(g.value) in (int, float)}
        self.changes = earlier.changes + Counter(moved)
        settling = {path for path in moved if self.changes[path] >= _DISTINCT_NUMBERS - 1}
        self.settled, self.volatile = earlier.settled, earlier.volatile
        if moved == settling:
            reason = f"its constant follows {', '.join(sorted(moved)) or 'something outside the block'}"
            self.settled = earlier.settled | settling
            self.volatile = {**dict.fromkeys(differing, reason), **earlier.volatile}
        self.guards = tuple(guard for guard in self.guards if guard.path not in self.settled)


class Block:
    """A block and its records; the oldest of more than eight is forgotten."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._records: list[tuple[Hashable, Record]] = []

    def find(self, signature: Hashable) -> Record | None:
        """The record for this signature whose numbers all still stand."""
        for position, (known, record) in enumerate(self._records):
            if known == signature and record.holds():
                if position:
                    self._records.insert(0, self._records.pop(position))
                return record
        return None

    def latest(self, signature: Hashable) -> Record | None:
        """The last used record for this signature, whatever its numbers."""
        return next((record for known, record in self._records if known == signature), None)

    def add(self, signature: Hashable, record: Record) -> None:
        """Keep a new record, in the place of one that holds for the same calls."""
        others = [(s, r) for s, r in self._records if not (s == signature and r.holds())]
        self._records = [(signature, record), *others][:_RECORDS]

    def records(self) -> list[Record]:
        return [record for _, record in self._records]


def _differing_constants(old: Recording, new: Recording) -> list[int] | None:
    """Operators that differ in constants alone, or None if the programs differ in more than that."""
    if len(old.ops) != len(new.ops) or old.positions != new.positions:
        return None
    differing = []
    for before, after in zip(old.ops, new.ops, strict=True):
        if _shape(before) != _shape(after):
            return None
        if (before.args, before.kwargs) != (after.args, after.kwargs):
            differing.append(after.index)
    return differing


def _shape(op: Op) -> tuple[object, ...]:
    return op.name, op.outputs, tuple(op.references)
