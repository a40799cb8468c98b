"""What happens between steps: predictions are compared with what was seen, and policies are made for what is new.

After the engine's own step (`engine/hooks.py`), and once any rank has called a block (`engine/adacc.py`), in this order
(`StepController.end_step`):

1. The last forward and backward are over: their block types were alive together, as one live set.
2. The step is counted. What was observed in the first step under a plan is compared with it, and the table is printed.
   If the model was wrong, it is corrected, and a new plan is due.
3. Live sets that have no plan are planned for, by all ranks together.
4. After a tracking step the rectifier judges the outliers. If they have drifted, a new plan is made.
5. Whether or not planning has failed, the next step begins, with its purpose (`next_purpose`). Events for DeepSpeed's
   monitors follow.

The plan changes in `decide` alone, which steps 3 and 4 call; `restore` takes it from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ds_adacc import planner
from ds_adacc.execute.block import Block, Record
from ds_adacc.execute.blocks import Registry
from ds_adacc.execute.input_placement import InputPlacement
from ds_adacc.log import get_logger
from ds_adacc.plan.coordinator import Coordinator, CoordinatorState
from ds_adacc.plan.correction import Correction
from ds_adacc.plan.plan import LiveSet, Plan, Policies
from ds_adacc.plan.ranks import Ranks
from ds_adacc.record.recording import Recording
from ds_adacc.rectify.calibration import Calibration, Pair, Seen
from ds_adacc.rectify.rectifier import Rectifier, Review, Verdict
from ds_adacc.report.journal import Journal
from ds_adacc.report.table import decision_table, told
from ds_adacc.runtime.binder import Binder
from ds_adacc.runtime.step import Purpose, Step, StepSchedule


@dataclass(frozen=True)
class ControllerState:
    """What a checkpoint keeps of a `StepController`.

    `corrected` and `reason` are the calibration's.
    """

    coordinator: CoordinatorState = field(default_factory=CoordinatorState)
    plan: Plan | None = None
    seen: Seen | None = None
    corrected: int = 0
    reason: str = ""
    schedule: StepSchedule = field(default_factory=StepSchedule)


class StepController:
    """Owns the step under way and the schedule of the next ones, and decides when a plan changes.

    With an engine (`stepped`) plans change at its step boundaries only. Without one, a forward that follows a backward
    begins a new step, on all of `ranks` alike. `seen` is what the first step under the plan has shown, None before;
    `review` what came of the step that has just ended, None if that was no tracking step.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        binder: Binder,
        ranks: Ranks,
        journal: Journal,
        stepped: bool = False,
        rectifier: Rectifier | None = None,
    ) -> None:
        self.blocks = Registry()
        self.coordinator = coordinator
        self.rectifier = rectifier
        self.journal = journal
        self.ranks = ranks
        self.stepped = stepped
        self.device: torch.device | None = None
        self.plan: Plan | None = None
        self.seen: Seen | None = None
        self.review: Review | None = None
        self.schedule = StepSchedule()
        self.step = Step(Purpose.RECORD)
        self._binder = binder
        self._calibration = Calibration()
        self._waiting: set[LiveSet] = set()  # have run, and are not planned for
        self._planned: set[LiveSet] = set()  # have run, and are
        self._is_resumed = False
        self._log = get_logger()

    # -- while a step runs

    def begin_call(self) -> None:
        """A block is about to run. Without an engine, a forward that follows a backward begins a new step."""
        if self.stepped:
            return
        if self.step.observer is None:
            self.step.live.clear()  # nobody ends the passes
        if not self.step.was_observed:
            return
        if self.step.is_partly_observed:
            self.step = Step(Purpose.RECORD)  # what ran before the new block was not counted: look at a whole step
        else:
            self.end_step()

    def note_call(self, block_type: str) -> None:
        """A block of this type is called."""
        self.step.note_call(block_type, self.coordinator.block_types[block_type].agreed is not None)

    def note_device(self, tensors: Sequence[torch.Tensor]) -> None:
        """The blocks run on the device of these tensors: an accelerator, if any of them lies on one."""
        if self.device is None or self.device.type == "cpu":
            self.device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))

    def end_backward(self) -> None:
        """A forward and its backward have ended: the block types that ran were alive together."""
        live_set = self.step.end_pass()
        if live_set and live_set not in self._planned:
            (self._planned if self.coordinator.is_planned(live_set) else self._waiting).add(live_set)

    def abandon(self) -> None:
        """A backward has failed, or the runtime is no longer used: what is under way is not looked at."""
        self.step.close()
        step, self.step = self.step, Step(self.step.purpose, self.device)
        self.step.passes, self.step.verified = step.passes, step.verified

    # -- when a step ends

    def end_step(self) -> None:
        """A step has ended. Every rank must call. Raises what planning raises; the next step has begun all the same."""
        self.end_backward()
        self.schedule = self.schedule.with_step_ended()
        self.review = None
        try:
            corrections = self.compare()
            if self.ranks.any(self.is_waiting):
                self.plan_waiting(corrections)
            if self.step.is_tracking:
                self.review = self._rectify()
        finally:
            self.step.close()
            self.step = Step(self.next_purpose(), self.device)

    def next_purpose(self) -> Purpose:
        """What the next step is for.

        Whether it is a tracking step must not depend on what this rank has seen: the ranks meet at its end. So the
        schedule decides that, which is the same on all of them.
        """
        schedule = self.schedule
        if self.plan is None:
            return Purpose.RECORD
        if schedule.look_in is not None:
            return Purpose.MEASURE if schedule.look_in == 0 and schedule.measures else Purpose.RECORD
        if self.rectifier is not None and schedule.is_tracking_due:
            return Purpose.TRACK
        if self.seen is None or self.is_waiting or (not self.stepped and self.coordinator.undecided):
            return Purpose.RECORD
        return Purpose.RUN

    @property
    def is_waiting(self) -> bool:
        """Whether block types have run together that no plan is for."""
        return bool(self._waiting)

    def compare(self) -> Mapping[str, Correction]:
        """Compare the first step under a plan with it, and say so in one table.

        Returns the corrections of the model. If they ask for a new plan, its live sets wait for one.
        """
        if self._is_resumed and self.coordinator.block_types:
            self._report_resumed()
        step, plan = self.step, self.plan
        if plan is None:
            return {}
        is_deferred = self.schedule.look_in == 1
        self.schedule = self.schedule.after_look()  # also on a rank that saw nothing: schedules must stay the same
        if is_deferred or self.seen is not None or not step.was_observed:
            return {}
        held = Pair(self.coordinator.held_bytes(step.observer.held_calls), step.observer.held_bytes)
        findings = self._calibration.compare(plan, held, step.observer.measured, self.coordinator.block_types)
        self.seen = findings.seen
        self._waiting |= findings.live_sets
        self._log.info("%s", self.describe())
        self.journal.write("observed", step=self.schedule.ended, **asdict(self.seen))
        return findings.corrections

    def plan_waiting(self, corrections: Mapping[str, Correction] | None = None) -> None:
        """Have policies made for the live sets that wait for some. The first plan must fit."""
        is_first = self.plan is None
        reason = self._calibration.reason or "blocks ran together that had not before"
        if self.coordinator.undecided:
            reason = "new shapes recorded"
        waiting, self._waiting = self._waiting, set()
        self.decide(waiting, "first step recorded" if is_first else reason, is_first, corrections=corrections)

    def decide(
        self,
        live_sets: Collection[LiveSet],
        reason: str,
        must_fit: bool = True,
        capacity: Mapping[str, Mapping[int, int]] | None = None,
        corrections: Mapping[str, Correction] | None = None,
    ) -> Plan:
        """Have policies made for these live sets, with the other ranks, and put them in force here."""
        for digest in {digest for names in live_sets for digest in names} & self.coordinator.block_types.keys():
            alive = self.step.observer.most_alive[digest] if self.step.observer else 0
            self.coordinator.count(digest, alive, self.blocks.count(digest))
        for seen in self.step.passes.values():
            self.coordinator.arrange(seen)
        self.step.passes = {}
        plan = self.coordinator.decide(live_sets, self.device, reason, must_fit, capacity, corrections)
        self.plan, self.seen, self._planned = plan, None, set()
        self.schedule = self.schedule.with_new_plan()
        for block_type in plan.block_types:
            self._rebind(block_type.name)
        self.coordinator.keep({record.block_type for _, record in self.blocks.records()})
        self.journal.write("plan", **told(plan, self.coordinator, self.schedule.ended))
        return plan

    def _rebind(self, digest: str) -> None:
        """Put the type's policies in force for its blocks, with the outlier channels last seen."""
        for block, record in self.blocks.records():
            if record.block_type == digest:
                self.bind(block, record)

    def bind(self, block: Block, record: Record, recording: Recording | None = None) -> None:
        """Put the policy that is in force for this block into its record."""
        index = self.coordinator.forward_order.index(block, record.block_type)
        known = self.coordinator.block_types[record.block_type]
        self._binder.bind(
            record, recording or record.bound.recording, known, index, self.coordinator.inputs, self.device
        )

    # -- the rectifier's verdict

    def _rectify(self) -> Review:
        """Act on what the rectifier finds: re-plan if outliers have drifted, else keep the channels last seen."""
        records = [record for _, record in self.blocks.records()]
        verdict = self.rectifier.judge(records, self.coordinator)
        if verdict.drifted:
            review = self._replan(verdict)
            self.journal.write("rectifier", step=self.schedule.ended, reason=verdict.reason, **asdict(review))
        else:
            review = Review()
            for digest in self.coordinator.block_types:
                self._rebind(digest)
        longest = self.rectifier.config.max_interval
        self.schedule = self.schedule.after_tracking(bool(review.changed), longest)
        return review

    def _replan(self, verdict: Verdict) -> Review:
        step = self.schedule.ended
        live_sets = self.coordinator.partners(verdict.drifted)
        if not live_sets:
            return self._stay(verdict, "nothing fits the budget")
        digests = {digest for names in live_sets for digest in names}
        old = self.coordinator.agreed_policies(digests)  # of all ranks: the next tracking step follows from them
        try:
            plan = self.decide(live_sets, f"step {step}: {verdict.reason}", True, capacity=verdict.capacity)
        except (planner.InfeasibleBudget, planner.NoSolutionInTime) as error:
            return self._stay(verdict, error)
        changed = sum(_differences(old.get(digest), plan.policies.get(digest)) for digest in digests)
        self._log.info("step %d: %s: re-planned, %d values changed", step, verdict.reason, changed)
        return Review(True, changed)

    def _stay(self, verdict: Verdict, why: object) -> Review:
        self._log.warning("step %d: %s, but the plan in force stays: %s", self.schedule.ended, verdict.reason, why)
        return Review()

    # -- what others ask for

    def hold_inputs(self, placement: InputPlacement) -> None:
        """Hold retained block inputs so from the next call on, and plan for it at the end of the next step.

        Every rank must call, between two steps.
        """
        if placement == self.coordinator.inputs:
            return
        self.coordinator.inputs = placement
        for digest in self.coordinator.block_types:
            self._rebind(digest)
        if self.plan is not None:
            in_force = {names for group in self.plan.groups for names in group.live_sets}
            self._waiting, self._planned = self._waiting | self._planned | in_force, set()
            self.step.close()
            self.step = Step(Purpose.RECORD)  # so on every rank, which all call this

    def describe(self) -> str:
        """The table of the plan in force, with what was observed."""
        assert self.plan is not None
        return decision_table(self.plan, self.coordinator, self.seen)

    # -- checkpoints

    def state_is_saved(self) -> None:
        """The state is about to be saved, between two steps: a measurement that is due next is put off."""
        schedule = self.schedule.with_state_saved()
        if schedule != self.schedule:
            self.schedule = schedule
            self.step.close()
            self.step = Step(self.next_purpose(), self.device)

    def state(self) -> ControllerState:
        """What outlives the process."""
        return ControllerState(
            coordinator=self.coordinator.state(),
            plan=self.plan,
            seen=self.seen,
            corrected=self._calibration.corrected,
            reason=self._calibration.reason,
            schedule=self.schedule,
        )

    def blocks_to_plain(self) -> list[dict[str, Any]]:
        """All blocks with their records and their indices in forward order, as plain containers with tensors."""
        indices = self.coordinator.forward_order.indices
        return [{**block.to_plain(), "indices": indices(block)} for block in self.blocks.every()]

    def restore(self, state: ControllerState, blocks: Sequence[Mapping[str, Any]]) -> None:
        """Go on from there; `blocks` are `blocks_to_plain`'s.

        All blocks are recorded anew, and those known to the state run by its policies at once.
        """
        self.step.close()
        self.blocks = Registry(blocks)
        indices = [block["indices"] for block in blocks]
        self.coordinator.restore(state.coordinator, self.blocks.every(), indices)
        self._calibration = Calibration(state.corrected, state.reason)
        self.plan, self.seen, self.review = state.plan, state.seen, None
        self.schedule = state.schedule
        if self.rectifier is not None:
            self.schedule = self.schedule.no_longer_than(self.rectifier.config.max_interval)
        self._waiting, self._planned = set(), set(state.coordinator.live_sets)
        self._is_resumed = state.plan is not None
        self.step = Step(self.next_purpose(), self.device)

    def _report_resumed(self) -> None:
        """The first step of a resumed run has shown the blocks: say which plan they run."""
        assert self.plan is not None
        self._is_resumed = False
        if self.plan.policies.keys().isdisjoint(self.coordinator.block_types):
            self._log.warning("the plan is made anew: no recorded block matches the checkpoint's plan")
            return
        self.journal.write("plan", **told(self.plan, self.coordinator, self.schedule.ended))
        if self.seen is not None:
            self._log.info("%s", self.describe())


def _differences(old: Policies | None, new: Policies | None) -> int:
    """How many values of how many blocks are stored otherwise."""
    if old is None or new is None or len(old) != len(new):
        return sum(len(policy.stores) for policy in new or ())
    stores = (
        (a, b) for before, after in zip(old, new, strict=True) for a, b in zip(before.stores, after.stores, strict=True)
    )
    return sum(a != b for a, b in stores)
