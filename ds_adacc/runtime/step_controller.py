"""What happens between steps: predictions are held against what was seen, and policies made for what is new."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ds_adacc import planner
from ds_adacc.config import AdaccConfig
from ds_adacc.engine.checkpoint_file import RuntimeState
from ds_adacc.execute.blocks import Registry
from ds_adacc.execute.input_placement import InputPlacement
from ds_adacc.log import get_logger
from ds_adacc.plan.coordinator import Coordinator
from ds_adacc.plan.plan import LiveSet, Plan
from ds_adacc.plan.ranks import Ranks
from ds_adacc.profile.cache import ProfileCache
from ds_adacc.profile.codecs import CodecMaker
from ds_adacc.profile.profiler import Profiler
from ds_adacc.rectify.calibration import Calibration, Pair, Seen
from ds_adacc.rectify.observer import Observer, Pass
from ds_adacc.rectify.step_profiler import StepProfiler
from ds_adacc.report.journal import Journal
from ds_adacc.report.table import decision_table, told
from ds_adacc.runtime.binder import Binder


class Steps:
    """The state of ds_adacc in one process: blocks, block types, the plan in force, the step's observation.

    With an engine attached (`stepped`), plans change at its step boundaries only. Without one, a forward that follows a
    backward begins a new step, on all of `ranks` alike: the block types met by then are planned for. The step after
    `meters_after` is metered.
    """

    def __init__(
        self,
        config: AdaccConfig,
        ranks: Ranks | None = None,
        stepped: bool = False,
        store: ProfileCache | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.config = config
        self.codecs = CodecMaker(config)
        self.profiler = Profiler(config, self.codecs, store)
        self.journal = journal or Journal(None)
        self.ranks = ranks or Ranks()
        self.blocks = Registry()
        self.coordinator = Coordinator(config, self.codecs, self.ranks)
        self._calibration = Calibration(self.coordinator)
        self.observer: Observer | None = Observer()
        self.plan: Plan | None = None
        self.seen: Seen | None = None
        self.tracking = False
        self.steps = 0
        self.meters_after: int | None = None
        self._stepped = stepped
        self._device: torch.device | None = None
        self._binder = Binder(self.codecs)
        self._live_sets: set[str] = set()
        self._waiting: set[LiveSet] = set()
        self._fitting: set[LiveSet] = set()
        self._passes: dict[LiveSet, Pass] = {}
        self._began_late = False
        self._unmetered = False
        self._postponed = False
        self._untold = False
        self._tracked: set[str] = set()
        self._log = get_logger()

    def _advance(self) -> None:
        """Without an engine's step boundary: a forward that follows a backward begins a new step."""
        if self.observer is None:
            self._live_sets.clear()
        if self.observer is None or self.observer.held_bytes is None:
            return
        if self._began_late:
            self._began_late, self.observer = False, Observer()
            self._live_sets.clear()
            return
        self.end_backward()
        self.end_step()

    def end_step(self) -> None:
        """A step has ended: report what was observed, plan for what is new. Every rank must call."""
        self.steps += 1
        self._count_calls({digest for names in self._waiting for digest in names} & self.coordinator.block_types.keys())
        self.report()
        if self.ranks.any(bool(self._waiting)):
            self.plan_waiting()
        self._passes = {}

    def end_backward(self) -> None:
        """A forward and its backward have ended: the block types that ran were alive together."""
        live_sets = frozenset(self._live_sets)
        self._live_sets = set()
        if self.observer is not None:
            seen = self.observer.end_pass()
            known = self._passes.get(live_sets)
            if known is None or len(seen.calls) > len(known.calls):
                self._passes[live_sets] = seen
        if live_sets and live_sets not in self._fitting:
            planned = self.coordinator.is_planned(live_sets)
            (self._fitting if planned else self._waiting).add(live_sets)

    @property
    def held(self) -> Pair | None:
        """Bytes held when backward began, as planned for the very calls of that step, and as seen."""
        return self.seen and self.seen.held

    @property
    def waiting(self) -> bool:
        """Whether block types have run together that are not planned for."""
        return bool(self._waiting)

    def plan_waiting(self) -> None:
        """Have policies made for the block types that wait for one. The first must fit."""
        first = self.plan is None
        new = self._calibration.reason or "blocks ran together that had not before"
        if self.coordinator.undecided:
            new = "new shapes recorded"
        waiting, self._waiting = self._waiting, set()
        try:
            self.decide(waiting, "first step recorded" if first else new, must_fit=first)
        except planner.InfeasibleBudget:
            self.observe()  # a smaller batch may follow
            raise

    def decide(self, live_sets: Collection[LiveSet], reason: str, must_fit: bool = True) -> Plan:
        """Have policies made for these block types, with the other ranks, and put them in force here."""
        self._count_calls({digest for names in live_sets for digest in names} & self.coordinator.block_types.keys())
        for seen in self._passes.values():
            for record in self.blocks.records():
                if record.block_type in seen.block_types:
                    record.place = None
            self.coordinator.arrange(seen)
        self._passes = {}
        plan = self.coordinator.decide(live_sets, self._device, reason, must_fit)
        self._fitting = set()
        self.plan, self.meters_after = plan, self.steps
        for block_type in plan.block_types:
            self.rebind(block_type.name)
        self.coordinator.keep({record.block_type for record in self.blocks.records()})
        self._unmetered = self._postponed = False
        self._meter()
        self.seen = None
        self.journal.write("plan", **told(plan, self.coordinator, self.steps))
        return plan

    def abandon(self) -> None:
        """A backward has failed, or the runtime is no longer used: look at nothing that is under way."""
        self._live_sets.clear()
        if self.observer is not None:
            self.observe(StepProfiler(self._device) if self.observer.is_metered else None)

    def _meter(self) -> None:
        """Measure the next step."""
        self.observe(StepProfiler(self._device) if self._device is not None else None)

    def observe(self, meter: StepProfiler | None = None) -> None:
        """Look at the next step."""
        if self.observer is not None:
            self.observer.close()
        self.observer = Observer(meter)

    def rebind(self, digest: str) -> None:
        """Put the block type's policy in force for its records, with the outlier channels last seen."""
        for record in self.blocks.records():
            if record.block_type == digest and record.bound is not None:
                self._binder.bind(record, record.bound.recording, self.coordinator.block_types[digest], self._device)

    def hold_inputs(self, placement: InputPlacement) -> None:
        """Hold the block inputs that policies retain so from the next call on, and plan for it at the next step's end.

        Every rank must call, between two steps.
        """
        if placement == self.coordinator.inputs:
            return
        self.coordinator.inputs = self._binder.inputs = placement
        for digest in self.coordinator.block_types:
            self.rebind(digest)
        if self.plan is not None:
            self._waiting, self._fitting = self._waiting | self._fitting, set()
            self.observe()

    def begin_tracking(self) -> None:
        self.tracking = True
        self._tracked = set()

    def end_tracking(self) -> None:
        self.tracking = False

    def report(self) -> None:
        """Once the first step under a new plan has been observed: say what was planned and what was seen.

        If the model was wrong, it is corrected, and the plan to be made anew.
        """
        if self._untold and self.coordinator.block_types:
            self._tell_again()
        seen = self.observer
        if self.plan is None or seen is None or seen.held_bytes is None:
            return
        if self._unmetered:
            self._unmetered = False
            self._meter()
            return
        # Without an engine, a block type that has yet to be planned for is looked out for.
        self.observer = Observer() if self.coordinator.undecided and not self._stepped else None
        if self.seen is None:
            held = Pair(self.coordinator.held_bytes(seen.held_calls), seen.held_bytes)
            self.seen, wrong = self._calibration.close(self.plan, held, seen.measured)
            self._waiting |= wrong
            self._log.info("%s", self.describe())
            self.journal.write("observed", step=self.steps, **self.seen.to_json())

    def _tell_again(self) -> None:
        """The first step of a resumed run has shown the blocks of the plan that it took over."""
        assert self.plan is not None
        self._untold = False
        if self.plan.policies.keys().isdisjoint(self.coordinator.block_types):
            self._log.warning("the plan is made anew: no block runs a program that the checkpoint's plan is for")
            return
        self.journal.write("plan", **told(self.plan, self.coordinator, self.steps))
        if self.seen is not None:
            self._log.info("%s", self.describe())

    def describe(self) -> str:
        """The table of the decision in force, with what was observed."""
        assert self.plan is not None
        return decision_table(self.plan, self.coordinator, self.seen)

    # -- checkpoints

    def rest(self) -> None:
        """A plan's first step is still to be looked at: measure the second, or none if this happens again.

        To be called when the state is saved: a resumed run records blocks in its first step, and can measure none.
        """
        if self.meters_after != self.steps:
            return
        self.meters_after = None if self._postponed else self.steps + 1
        self._unmetered = self._postponed = not self._postponed
        self.observe()

    def state(self) -> RuntimeState:
        """What outlives the process, after `rest`."""
        profiles = {digest: block_type.profile for digest, block_type in self.coordinator.block_types.items()}
        return RuntimeState(
            coordinator=self.coordinator.state(),
            profiles={**self.profiler.remembered, **profiles},
            plan=self.plan,
            seen=self.seen,
            corrected=self._calibration.corrected,
            reason=self._calibration.reason,
            unmetered=self._unmetered,
            postponed=self._postponed,
            steps=self.steps,
            meters_after=self.meters_after,
        )

    def restore(self, state: RuntimeState, blocks: Sequence[Mapping[str, Any]]) -> None:
        """Go on from there. All blocks are recorded anew, and those known to the state run by its policies at once."""
        self.abandon()
        self.blocks = Registry(blocks)
        self.coordinator.restore(state.coordinator)
        self.profiler.remembered = state.profiles
        self._calibration = Calibration(self.coordinator, state.corrected, state.reason)
        self.plan, self.seen = state.plan, state.seen
        self.steps, self.meters_after = state.steps, state.meters_after
        self._unmetered, self._postponed = state.unmetered, state.postponed
        self.tracking, self._untold = False, state.plan is not None
        self._live_sets, self._waiting, self._fitting = set(), set(), set(state.coordinator.live_sets)
        self._passes, self._tracked, self._began_late = {}, set(), False
        self.observer = Observer() if self.seen is None else None

    def _count_calls(self, digests: Collection[str]) -> None:
        for digest in digests:
            block_type = self.coordinator.block_types[digest]
            blocks = sum(any(record.block_type == digest for record in block.records()) for block in self.blocks.all())
            seen = self.observer.most_alive[digest] if self.observer else 0
            # A block type that has a policy may have run before the observation began.
            block_type.count = seen if seen and block_type.policies is None else max(block_type.count, seen, blocks)
