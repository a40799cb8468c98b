"""What earlier recordings tell of a block's guards: which decide nothing, and which change too often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_adacc.python_state.changes import changed_values, is_number, is_of_attributes
from ds_adacc.python_state.guards import Guards

_DISTINCT_NUMBERS, _DISTINCT_CONTAINERS = 3, 8  # a cache in a block may fill during the first steps, and then settle


@dataclass
class GuardHistory:
    """The marks of what a block depends on when it was recorded, and what earlier recordings tell of them."""

    guards: Guards | None = None  # None: any will do
    changes: Counter[str] = field(default_factory=Counter)  # how often each number and container was found changed
    ignored: frozenset[str] = frozenset()  # those that are guarded no longer, as they keep changing
    named: frozenset[str] | None = None  # the names in the code that ran while it was recorded; None: not known
    # How often each attribute that is a number, and that no such code names, was found changed while the program and
    # its constants stayed the same.
    harmless: Counter[str] = field(default_factory=Counter)
    decisive: frozenset[str] = frozenset()  # with these alone the program has changed once: they are never harmless
    # Harmless ones that were seen with three values, such as the iteration among a script's arguments: they are guarded
    # no longer.
    unread: frozenset[str] = frozenset()
    # What the block depends on that no guard watches; while there is anything, nothing is replayed (Rule E11).
    doubt: str = ""

    def holds(self, guards: Guards) -> bool:
        """Whether the block runs the recorded program when what it depends on has these marks."""
        if self.guards is None or self.guards is guards:
            return True
        if self.guards == guards:
            self.guards = guards  # those of the next call are the same object, unless something changes
            return True
        if not (self.ignored or self.unread):
            return False
        changed = changed_values(self.guards, guards, self.ignored)
        if changed and changed <= self.unread:
            self.guards = guards
        return bool(changed) and changed <= self.ignored | self.unread

    def at_other_sizes(self, guards: Guards) -> GuardHistory:
        """That of the same program at other sizes of its inputs."""
        return GuardHistory(guards, self.changes, self.ignored, unread=self.unread, doubt=self.doubt)

    def succeed(self, earlier: GuardHistory, had_settled: bool, is_same_program: bool) -> None:
        """Learn from the last recording under the same signature, since which something has changed (Rule E11).

        A number on a schedule, or a list that grows, would have the block recorded at every step. Once a number has
        been seen with three values, or a container with eight, it is guarded no longer. Then nothing is replayed: its
        next value may change any constant or choose another branch. If the block `had_settled` before this change, the
        changes until then do not count: to record it now and then takes little time.

        `is_same_program`: what was recorded is as before, with all constants. A number that no code names is guarded no
        longer once three values of it have made no difference, unless it has made one alone. Then replays go on.
        """
        self.changes, self.ignored, self.doubt = earlier.changes, earlier.ignored, earlier.doubt
        self.harmless, self.decisive = earlier.harmless, earlier.decisive
        self.unread = frozenset(self._unnamed(earlier.unread))
        if earlier.guards is None or self.guards is None or earlier.guards == self.guards:
            return
        changed = changed_values(earlier.guards, self.guards, earlier.ignored)
        if changed is None:
            return
        changed -= earlier.ignored | self.unread
        unnamed = self._unnamed(changed) & earlier._unnamed(changed)
        if not is_same_program and changed <= unnamed:
            self.decisive |= changed
        harmless = unnamed - self.decisive if is_same_program else set[str]()
        self.harmless = earlier.harmless + Counter(harmless)
        self.unread |= {name for name in harmless if self.harmless[name] >= _DISTINCT_NUMBERS - 1}
        changed -= harmless
        self.changes = Counter(changed) if had_settled else earlier.changes + Counter(changed)
        most = {name: _DISTINCT_NUMBERS if is_number(self.guards[name]) else _DISTINCT_CONTAINERS for name in changed}
        if changed and all(self.changes[name] >= count - 1 for name, count in most.items()):
            self.ignored = earlier.ignored | changed
            self.doubt = self.doubt or f"{in_short(changed - unnamed or changed)}, which keeps changing"

    def learn_at_other_sizes(self, others: Sequence[GuardHistory], is_alike: bool) -> None:
        """Learn from recordings at other sizes which numbers make no difference, though no code names them.

        Where lengths vary, a length may not come thrice for a long time. `others`: the last used comes first.
        `is_alike`: the same operators ran there, with the same constants.
        """
        earlier = others[0]
        self.harmless = earlier.harmless
        self.decisive = frozenset[str]().union(*(other.decisive for other in others))
        self.unread = frozenset(self._unnamed(earlier.unread)) - self.decisive
        if not is_alike or earlier.guards is None or self.guards is None:
            return
        changed = changed_values(earlier.guards, self.guards, earlier.ignored) or set()
        changed -= earlier.ignored | self.unread
        unnamed = self._unnamed(changed) & earlier._unnamed(changed)
        if changed <= unnamed - self.decisive:
            self.harmless = earlier.harmless + Counter(changed)
            self.unread |= {name for name in changed if self.harmless[name] >= _DISTINCT_NUMBERS - 1}

    def _unnamed(self, numbers: Collection[str]) -> set[str]:
        """Those of the numbers that an object or a module keeps as attributes which no code of the block names."""
        if self.named is None or self.guards is None:
            return set()
        parts = ((name, *name.rpartition(".")) for name in numbers)
        return {
            name
            for name, owner, _, key in parts
            if key.isidentifier() and key not in self.named and is_number(self.guards.get(name))
            if is_of_attributes(self.guards.get(owner))
        }

    def to_plain(self) -> dict[str, Any]:
        """What a checkpoint keeps of it: plain containers, numbers and texts."""
        return {"changes": dict(self.changes), "ignored": sorted(self.ignored), "doubt": self.doubt}

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> GuardHistory:
        """The history that `to_plain` made `data` of."""
        return cls(changes=Counter(data["changes"]), ignored=frozenset(data["ignored"]), doubt=data["doubt"])


def as_clause(doubt: str) -> str:
    """A doubt with the reason why nothing is replayed: it keeps changing, or nobody can watch it."""
    return doubt if doubt.endswith("keeps changing") else f"{doubt}, which ds_adacc cannot watch"


def in_short(names: Collection[str]) -> str:
    """The first of the names, and how many more there are."""
    first, *others = sorted(names)
    return f"{first} (and {len(others)} more)" if others else first
