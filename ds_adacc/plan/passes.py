"""How many calls of each block type were alive at once, in the passes that took the most."""

from __future__ import annotations

from collections.abc import Collection

from ds_adacc.plan.live_sets import Alive, LiveSet


class Passes:
    """The passes of each live set, without those of which another one had as many calls of every block type alive."""

    def __init__(self) -> None:
        self._of: dict[LiveSet, tuple[Alive, ...]] = {}

    def note(self, alive: Alive) -> None:
        """Note a pass with so many calls alive."""
        names = frozenset(alive)
        others = [known for known in self.of(names) if any(known[name] > alive[name] for name in names)]
        if not any(all(known[name] >= alive[name] for name in names) for known in others):
            self._of[names] = (*others, alive)

    def of(self, live_set: LiveSet) -> tuple[Alive, ...]:
        """The passes that had just these block types alive."""
        return self._of.get(live_set, ())

    def within(self, names: Collection[str]) -> list[Alive]:
        """The passes that had no other block types alive."""
        return [alive for live_set, passes in self._of.items() if live_set <= set(names) for alive in passes]

    def forget_all_but(self, names: Collection[str]) -> None:
        """Forget the passes with any other block type."""
        self._of = {live_set: passes for live_set, passes in self._of.items() if live_set <= set(names)}
