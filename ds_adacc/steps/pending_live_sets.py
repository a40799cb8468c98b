"""The live sets for which a plan is pending, and what has run of late under a plan."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from ds_adacc.execute.block import Block
from ds_adacc.plan.agreement import Agreement
from ds_adacc.plan.block_type import TypePlan
from ds_adacc.plan.correction import Correction
from ds_adacc.plan.live_sets import Alive, LiveSet
from ds_adacc.plan.peak_estimate import have_plan, peak_without
from ds_adacc.sizes.new_sizes import NewSizes
from ds_adacc.steps.current_pass import CalledByType

Known = TypeVar("Known")
_PAUSE = 8  # steps from a plan to one for larger inputs: what many ranks meet in many steps is planned for at once
_MOST_PLANNED = 1024  # live sets that are known to have a plan; each pair of input sizes is one


class PendingLiveSets:
    """The live sets that this rank has run, and which of them wait for a plan. It is true if any do.

    `wants_observation`: more blocks have run than were planned for, or others, in a step that was not observed. The
    plan for them needs their order.
    """

    def __init__(self, agreement: Agreement, new_sizes: NewSizes) -> None:
        self._reasons: dict[LiveSet, str] = {}  # why each live set that waits needs a plan
        self._corrections: Mapping[str, Correction] = {}  # for that plan
        self._late: set[tuple[str, str]] = set()  # why a block type is to wait when the step has ended, and its name
        self._steps_since_plan = 0
        # of each block type, the most blocks that one forward has called, whatever the sizes of their inputs
        self._most_blocks: Counter[str] = Counter()
        self._agreement = agreement
        self._new_sizes = new_sizes
        # what has run of late and has a plan, with the most calls of each block type for which it has one
        self._planned: dict[LiveSet, Alive] = {names: Counter() for names in agreement.live_sets}
        self._outgrown: set[LiveSet] = set()  # has a plan, and is worth another one
        self.wants_observation = False
        self._asked: weakref.WeakSet[Block] = weakref.WeakSet()  # have called for a plan

    def note(self, ran: CalledByType, is_observed: bool) -> bool:
        """Note what one pass has called: these block types were alive together.

        Returns whether they have got other policies by that.
        """
        for name, called in ran.items():
            self._agreement.note_alive(name, called.alive, len(called.blocks))
        if self._note_growth(ran, is_observed):
            return False
        alive = {name: called.alive for name, called in ran.items()}
        live_set, planned = frozenset(ran), self._planned.get(frozenset(ran))
        if not live_set or (planned is not None and all(planned[name] >= number for name, number in alive.items())):
            return False
        self._agreement.passes.note(alive)
        self._agreement.budget.grow(peak_without(self._agreement, alive))
        is_planned = have_plan(self._agreement, alive)
        if not is_planned and not self._new_sizes.adopter.adopt_for_pass(alive):
            is_new = live_set not in (*self._planned, *self._agreement.live_sets, *self._agreement.unfit)
            more = "more calls of blocks were alive at once than were planned for"
            self.add([live_set], "blocks ran together that had not before" if is_new else more)
            return False
        if not is_planned:  # what has got other policies may be too large now beside others
            self._planned = _without(live_set, self._planned)
        if live_set in self._agreement.live_sets:  # another rank may have met it first
            self._new_sizes.origins.note_planned(live_set)
        elif self._new_sizes.origins.are_outgrown_by(alive):
            self._outgrown.add(live_set)
            self._agreement.take_order_of_origins(alive)  # a plan for them needs one
        if len(self._planned) >= _MOST_PLANNED:
            self._planned.clear()
        self._planned[live_set] = alive
        return not is_planned

    def note_kept_graph(self, ran: CalledByType) -> None:
        """Note that the backward of this pass has kept its graph. A plan for one that frees it takes more than it says.

        That one counts as free what steps of backward before have needed, in later blocks and in the same one.
        """
        types, live_set = self._agreement.known_types, frozenset(map(self._agreement.origin, ran))
        for name in types.keys() & {*ran, *live_set}:
            types[name].keeps_graph = True
        if any(types[name].plan_frees_what_is_kept for name in types.keys() & live_set):
            self.add([live_set], "a backward has kept its graph (retain_graph), so it frees nothing while it runs")

    def _note_growth(self, ran: CalledByType, is_observed: bool) -> bool:
        """See whether a block type ran in blocks that no rank had planned for.

        There may be more of them than before, as where layers are unfrozen. Or the index of a block is not known, as
        after LayerDrop has left it out: it may run nothing lossy until it has one. Each number of blocks, and each such
        block, calls for one plan at most. Returns whether they wait for a step that is observed.
        """
        counts: Counter[str] = Counter()
        unknown: set[Block] = set()
        for name, called in ran.items():
            origin = self._agreement.origin(name)
            counts[origin] = max(len(called.blocks), counts[origin])  # a block that ran at two sizes is one block
            unknown.update(block for block in called.blocks if self._agreement.lacks_index(block, name))
        planned = {name: self._agreement.type_plans.get(name) for name in counts}
        grown = {
            name: counts[name]
            for name, plan in planned.items()
            if plan is not None and counts[name] > max(self._most_blocks[name], _planned_blocks(plan))
        }
        is_due = grown or not unknown <= set(self._asked)
        if is_due and not is_observed:
            self.wants_observation = True
            return True
        if is_due:
            self.add([frozenset(counts)], "more blocks ran than were planned for, or others")
            self._asked.update(unknown)
        for name in grown.keys() & self._agreement.known_types.keys():
            self._agreement.note_alive(name, grown[name], grown[name])
        self._most_blocks |= counts
        return False

    def __bool__(self) -> bool:
        return bool(self._reasons)

    @property
    def names(self) -> set[str]:
        """The block types in the live sets that wait, or will at the end of the step."""
        waiting = {name for live_set in (*self._reasons, *self._outgrown) for name in live_set}
        return waiting | {name for _, name in self._late}

    @property
    def is_due(self) -> bool:
        """Whether this rank asks for a plan. If it knows none of the block types, it has nothing to report of them."""
        return bool(self) and not self.names.isdisjoint(self._agreement.known_types)

    def note_late(self, name: str, reason: str) -> None:
        """Note that something of the block type was learnt that its plan did not know."""
        self._late.add((reason, name))

    def end_step(self) -> None:
        """A step has ended. What has outgrown its plan waits for another one if the last plan is old enough."""
        late, self._late = sorted(self._late), set()
        for reason, name in late:
            if name in self._agreement.known_types:
                self.add(self._agreement.partners([name]), reason)
        self._steps_since_plan += 1
        if self._steps_since_plan >= _PAUSE:
            self.add(self._outgrown, "larger inputs came than were planned for")
            self._outgrown = set()

    def add(self, live_sets: Iterable[LiveSet], reason: str) -> None:
        """Have these live sets wait for a plan. `reason`: for the log, where none is known yet."""
        for live_set in live_sets:
            self._reasons.setdefault(live_set, reason)

    def correct(self, corrections: Mapping[str, Correction]) -> None:
        """Have the next plan count these corrections of the memory model, by block type, which this rank has measured.

        They replace those of before, if there are any.
        """
        self._corrections = corrections or self._corrections

    def take(self) -> tuple[Collection[LiveSet], str, Mapping[str, Correction]]:
        """What waits for a plan, why, and the corrections for it. Afterwards nothing waits."""
        taken, self._reasons = self._reasons, {}
        return taken.keys(), next(iter(taken.values()), ""), self._corrections

    def forget_corrections(self) -> None:
        """Forget the corrections, unless something waits for a plan that is to count them."""
        if not self:
            self._corrections = {}

    def forget_planned(self) -> None:
        """There is a new plan: forget which live sets have one."""
        for name in self._most_blocks.keys() - self._agreement.type_plans.keys():
            del self._most_blocks[name]
        self._planned, self._outgrown, self.wants_observation = {}, set(), False
        self._steps_since_plan = 0

    def forget(self, names: Collection[str]) -> None:
        """Forget the live sets with any of these block types, which this rank has forgotten.

        If one runs again, its block types get policies anew, and it is seen whether these fit together.
        """
        self._planned, self._reasons = _without(names, self._planned), _without(names, self._reasons)

    def add_all(self, reason: str) -> None:
        """Have all live sets wait for a new plan: what any plan of the run is for, and what has adopted from one."""
        self.add({*self._planned, *self._agreement.live_sets, *self._agreement.unfit}, reason)
        self._planned = {}


def _without(names: Collection[str], live_sets: Mapping[LiveSet, Known]) -> dict[LiveSet, Known]:
    """What is known of the live sets with none of these block types."""
    return {live_set: each for live_set, each in live_sets.items() if live_set.isdisjoint(names)}


def _planned_blocks(plan: TypePlan) -> int:
    """How many blocks the plan is for. Where these share a policy, nobody knows: at most as many as there are calls."""
    return plan.spec.blocks if plan.spec.blocks > 1 else plan.spec.count
