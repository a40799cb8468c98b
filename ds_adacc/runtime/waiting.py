"""Which block types have been alive together: those that wait for a plan, and those that have one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ds_adacc.plan.agreement import Agreement
from ds_adacc.plan.block_type import AgreedType
from ds_adacc.plan.live_sets import LiveSet
from ds_adacc.plan.new_sizes import NewSizes

_MOST_PLANNED = 1024  # live sets that are known to have a plan; each pair of input sizes is one


class Waiting:
    """The live sets that this rank has run. `live_sets`: those that wait for a plan.

    `most_blocks`: of each block type, the most blocks that one forward has called, whatever the sizes of their inputs.
    """

    def __init__(self, agreement: Agreement, new_sizes: NewSizes, planned: Iterable[LiveSet] = ()) -> None:
        self.live_sets: set[LiveSet] = set()
        self.most_blocks: Counter[str] = Counter()
        self._agreement = agreement
        self._new_sizes = new_sizes
        self._planned = set(planned)  # have run of late, and have a plan
        self._grown: set[LiveSet] = set()  # have a plan for fewer blocks

    def note(self, ran: Mapping[str, int]) -> bool:
        """Note that these block types were alive together, and in how many blocks each of them has run.

        Returns whether they have got other policies by that.
        """
        self._note_growth(ran)
        live_set = frozenset(ran)
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

    def _note_growth(self, ran: Mapping[str, int]) -> None:
        """See whether a block type ran in more blocks than any rank had planned for, as where layers are unfrozen.

        Each number of blocks calls for one plan at most: a rank may meet many before a plan knows of them.
        """
        blocks: dict[str, int] = {}
        for name, count in ran.items():  # a block that ran at two sizes is one block
            origin = self._agreement.origin(name)
            blocks[origin] = max(count, blocks.get(origin, 0))
        for name, count in blocks.items():
            agreed = self._agreement.agreed_types.get(name)
            if agreed is not None and count > max(self.most_blocks[name], _planned_blocks(agreed)):
                self._grown.add(frozenset(blocks))
            self.most_blocks[name] = max(self.most_blocks[name], count)

    def admit_grown(self) -> None:
        """Have the live sets that have grown wait for a plan. This comes after planning: a step observes them first."""
        self.live_sets |= self._grown
        self._grown = set()

    def take(self) -> set[LiveSet]:
        """What waits for a plan. Afterwards nothing does."""
        taken, self.live_sets = self.live_sets, set()
        return taken

    def ask_again(self) -> None:
        """Whether a live set has a plan is asked again when it runs, since there is a new one."""
        for name in self.most_blocks.keys() - self._agreement.agreed_types.keys():
            del self.most_blocks[name]
        self._planned = set()

    def all_wait(self, in_force: Iterable[LiveSet]) -> None:
        """Have all live sets wait for a new plan, those of the plan in force among them."""
        self.live_sets |= self._planned.union(in_force)
        self._planned = set()


def _planned_blocks(agreed: AgreedType) -> int:
    """How many blocks the plan is for. Where these share a policy, nobody knows: at most as many as there are calls."""
    return agreed.spec.blocks if agreed.spec.blocks > 1 else agreed.spec.count
