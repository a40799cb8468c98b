"""Which block types have been alive together: those that wait for a plan, and those that have one."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from ds_adacc.execute.block import Block
from ds_adacc.plan.agreement import Agreement
from ds_adacc.plan.block_type import AgreedType
from ds_adacc.plan.live_sets import LiveSet
from ds_adacc.plan.new_sizes import NewSizes

_MOST_PLANNED = 1024  # live sets that are known to have a plan; each pair of input sizes is one


class Waiting:
    """The live sets that this rank has run, and which of them wait for a plan.

    `most_blocks`: of each block type, the most blocks that one forward has called, whatever the sizes of their inputs.
    `wants_observation`: more blocks have run than were planned for, or others, in a step that was not observed. The
    plan for them needs their order.
    """

    def __init__(self, agreement: Agreement, new_sizes: NewSizes, planned: Iterable[LiveSet] = ()) -> None:
        self._reasons: dict[LiveSet, str] = {}  # why each live set that waits needs a plan
        self.most_blocks: Counter[str] = Counter()
        self._agreement = agreement
        self._new_sizes = new_sizes
        self._planned = set(planned)  # have run of late, and have a plan
        self.wants_observation = False
        self._asked: weakref.WeakSet[Block] = weakref.WeakSet()  # have called for a plan

    def note(self, ran: Mapping[str, Collection[Block]], is_observed: bool) -> bool:
        """Note that these block types were alive together, each in these blocks.

        Returns whether they have got other policies by that.
        """
        self._note_growth(ran, is_observed)
        live_set = frozenset(ran)
        if not live_set or live_set in self._planned:
            return False
        is_planned = self._agreement.is_planned(live_set)
        if not is_planned and not (self._new_sizes.adopt_all(live_set) or self._new_sizes.make_lean(live_set)):
            self.add([live_set], "blocks ran together that had not before")
            return False
        if len(self._planned) >= _MOST_PLANNED:
            self._planned.clear()
        self._planned.add(live_set)
        return not is_planned

    def _note_growth(self, ran: Mapping[str, Collection[Block]], is_observed: bool) -> None:
        """See whether a block type ran in more blocks than any rank had planned for, as where layers are unfrozen.

        Or in blocks of unknown index, as after LayerDrop has left them out: these may run nothing lossy. Each number of
        blocks, and each such block, calls for one plan at most.
        """
        counts: Counter[str] = Counter()
        unknown: set[Block] = set()
        for name, blocks in ran.items():
            origin = self._agreement.origin(name)
            counts[origin] = max(len(blocks), counts[origin])  # a block that ran at two sizes is one block
            unknown.update(block for block in blocks if self._agreement.lacks_index(block, name))
        planned = {name: self._agreement.agreed_types.get(name) for name in counts}
        has_grown = any(
            agreed is not None and counts[name] > max(self.most_blocks[name], _planned_blocks(agreed))
            for name, agreed in planned.items()
        )
        is_due = has_grown or not unknown <= set(self._asked)
        if is_due and not is_observed:
            self.wants_observation = True
            return
        if is_due:
            self.add([frozenset(counts)], "more blocks ran than were planned for, or others")
            self._asked.update(unknown)
        self.most_blocks |= counts

    def __bool__(self) -> bool:
        """Whether anything waits for a plan."""
        return bool(self._reasons)

    @property
    def names(self) -> set[str]:
        """The block types in the live sets that wait."""
        return {name for live_set in self._reasons for name in live_set}

    def add(self, live_sets: Iterable[LiveSet], reason: str) -> None:
        """Have these live sets wait for a plan. `reason`: for the log, where none is known yet."""
        for live_set in live_sets:
            self._reasons.setdefault(live_set, reason)

    def take(self) -> tuple[Collection[LiveSet], str]:
        """What waits for a plan, and why ("" if nothing does on this rank). Afterwards nothing does."""
        taken, self._reasons = self._reasons, {}
        return taken.keys(), next(iter(taken.values()), "")

    def ask_again(self) -> None:
        """There is a new plan: forget which live sets have one."""
        for name in self.most_blocks.keys() - self._agreement.agreed_types.keys():
            del self.most_blocks[name]
        self._planned, self.wants_observation = set(), False

    def all_wait(self, in_force: Iterable[LiveSet], reason: str) -> None:
        """Have all live sets wait for a new plan, those of the plan in force among them."""
        self.add(self._planned.union(in_force), reason)
        self._planned = set()


def _planned_blocks(agreed: AgreedType) -> int:
    """How many blocks the plan is for. Where these share a policy, nobody knows: at most as many as there are calls."""
    return agreed.spec.blocks if agreed.spec.blocks > 1 else agreed.spec.count
