"""Which block types have been alive together: those that wait for a plan, and those that have one."""

from __future__ import annotations

from collections.abc import Iterable

from ds_adacc.plan.agreement import Agreement
from ds_adacc.plan.live_sets import LiveSet
from ds_adacc.plan.new_sizes import NewSizes

_MOST_PLANNED = 1024  # live sets that are known to have a plan; each pair of input sizes is one


class Waiting:
    """The live sets that this rank has run. `live_sets`: those that wait for a plan."""

    def __init__(self, agreement: Agreement, new_sizes: NewSizes, planned: Iterable[LiveSet] = ()) -> None:
        self.live_sets: set[LiveSet] = set()
        self._agreement = agreement
        self._new_sizes = new_sizes
        self._planned = set(planned)  # have run of late, and have a plan

    def note(self, live_set: LiveSet) -> bool:
        """Note that these block types were alive together. Returns whether they have got other policies by that."""
        if not live_set or live_set in self._planned:
            return False
        is_planned = self._agreement.is_planned(live_set)
        if not is_planned and not self._new_sizes.make_lean(live_set):
            self.live_sets.add(live_set)
            return False
        if len(self._planned) >= _MOST_PLANNED:
            self._planned.clear()
        self._planned.add(live_set)
        return not is_planned

    def take(self) -> set[LiveSet]:
        """What waits for a plan. Afterwards nothing does."""
        taken, self.live_sets = self.live_sets, set()
        return taken

    def ask_again(self) -> None:
        """Whether a live set has a plan is asked again when it runs, since there is a new one."""
        self._planned = set()

    def all_wait(self, in_force: Iterable[LiveSet]) -> None:
        """Have all live sets wait for a new plan, those of the plan in force among them."""
        self.live_sets |= self._planned.union(in_force)
        self._planned = set()
