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
from ds_adacc.plan.coordinator import Portfolio
from ds_adacc.plan.plan import Decision, Together
from ds_adacc.plan.ranks import Ranks
from ds_adacc.profile.cache import ProfileStore
from ds_adacc.profile.measure import CodecMaker
from ds_adacc.profile.profiler import Profiler
from ds_adacc.rectify.calibration import Loop, Pair, Seen
from ds_adacc.rectify.observer import Observation, Pass
from ds_adacc.rectify.step_profiler import Meter
from ds_adacc.report.journal import Journal
from ds_adacc.report.table import decision_table, told
from ds_adacc.runtime.binder import Binder


class Steps:
    """The state of ds_adacc in one process: blocks, kinds, the plan in force, the step's observation.

    With an engine attached (`stepped`), plans change at its step boundaries only. Without one, a forward that follows a
    backward begins a new step, on all of `ranks` alike: the kinds met by then are planned for. The step after
    `meters_after` is metered.
    """

    def __init__(
        self,
        config: AdaccConfig,
        ranks: Ranks | None = None,
        stepped: bool = False,
        store: ProfileStore | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.config = config
        self.codecs = CodecMaker(config)
        self.profiler = Profiler(config, self.codecs, store)
        self.journal = journal or Journal(None)
        self.ranks = ranks or Ranks()
        self.blocks = Registry()
        self.portfolio = Portfolio(config, self.codecs, self.ranks)
        self._loop = Loop(self.portfolio)
        self.observation: Observation | None = Observation()
        self.decision: Decision | None = None
        self.seen: Seen | None = None
        self.tracking = False
        self.steps = 0
        self.meters_after: int | None = None
        self._stepped = stepped
        self._device: torch.device | None = None
        self._binder = Binder(self.codecs)
        self._together: set[str] = set()
        self._waiting: set[Together] = set()
        self._fitting: set[Together] = set()
        self._passes: dict[Together, Pass] = {}
        self._began_late = False
        self._unmetered = False
        self._postponed = False
        self._untold = False
        self._tracked: set[str] = set()
        self._log = get_logger()

    def _advance(self) -> None:
        """Without an engine's step boundary: a forward that follows a backward begins a new step."""
        if self.observation is None:
            self._together.clear()
        if self.observation is None or self.observation.held_bytes is None:
            return
        if self._began_late:
            self._began_late, self.observation = False, Observation()
            self._together.clear()
            return
        self.end_backward()
        self.end_step()

    def end_step(self) -> None:
        """A step has ended: report what was observed, plan for what is new. Every rank must call."""
        self.steps += 1
        self._count_calls({digest for names in self._waiting for digest in names} & self.portfolio.kinds.keys())
        self.report()
        if self.ranks.any(bool(self._waiting)):
            self.plan_waiting()
        self._passes = {}

    def end_backward(self) -> None:
        """A forward and its backward have ended: the kinds that ran were alive together."""
        together = frozenset(self._together)
        self._together = set()
        if self.observation is not None:
            seen = self.observation.end_pass()
            known = self._passes.get(together)
            if known is None or len(seen.calls) > len(known.calls):
                self._passes[together] = seen
        if together and together not in self._fitting:
            planned = self.portfolio.is_planned(together)
            (self._fitting if planned else self._waiting).add(together)

    @property
    def held(self) -> Pair | None:
        """Bytes held when backward began, as planned for the very calls of that step, and as seen."""
        return self.seen and self.seen.held

    @property
    def waiting(self) -> bool:
        """Whether kinds have run together that are not planned for."""
        return bool(self._waiting)

    def plan_waiting(self) -> None:
        """Have policies made for the kinds that wait for one. The first must fit."""
        first = self.decision is None
        new = self._loop.reason or "blocks ran together that had not before"
        if self.portfolio.undecided:
            new = "new shapes recorded"
        waiting, self._waiting = self._waiting, set()
        try:
            self.decide(waiting, "first step recorded" if first else new, must_fit=first)
        except planner.InfeasibleBudget:
            self.observe()  # a smaller batch may follow
            raise

    def decide(self, together: Collection[Together], reason: str, must_fit: bool = True) -> Decision:
        """Have policies made for these kinds, with the other ranks, and put them in force here."""
        self._count_calls({digest for names in together for digest in names} & self.portfolio.kinds.keys())
        for seen in self._passes.values():
            for record in self.blocks.records():
                if record.kind in seen.kinds:
                    record.place = None
            self.portfolio.arrange(seen)
        self._passes = {}
        decision = self.portfolio.decide(together, self._device, reason, must_fit)
        self._fitting = set()
        self.decision, self.meters_after = decision, self.steps
        for kind in decision.kinds:
            self.rebind(kind.name)
        self.portfolio.keep({record.kind for record in self.blocks.records()})
        self._unmetered = self._postponed = False
        self._meter()
        self.seen = None
        self.journal.write("plan", **told(decision, self.portfolio, self.steps))
        return decision

    def abandon(self) -> None:
        """A backward has failed, or the runtime is no longer used: look at nothing that is under way."""
        self._together.clear()
        if self.observation is not None:
            self.observe(Meter(self._device) if self.observation.is_metered else None)

    def _meter(self) -> None:
        """Measure the next step."""
        self.observe(Meter(self._device) if self._device is not None else None)

    def observe(self, meter: Meter | None = None) -> None:
        """Look at the next step."""
        if self.observation is not None:
            self.observation.close()
        self.observation = Observation(meter)

    def rebind(self, digest: str) -> None:
        """Put the kind's policy in force for its records, with the outlier channels last seen."""
        for record in self.blocks.records():
            if record.kind == digest and record.plan is not None:
                self._binder.bind(record, record.plan.recording, self.portfolio.kinds[digest], self._device)

    def hold_inputs(self, placement: InputPlacement) -> None:
        """Hold the block inputs that policies retain so from the next call on, and plan for it at the next step's end.

        Every rank must call, between two steps.
        """
        if placement == self.portfolio.inputs:
            return
        self.portfolio.inputs = self._binder.inputs = placement
        for digest in self.portfolio.kinds:
            self.rebind(digest)
        if self.decision is not None:
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
        if self._untold and self.portfolio.kinds:
            self._tell_again()
        seen = self.observation
        if self.decision is None or seen is None or seen.held_bytes is None:
            return
        if self._unmetered:
            self._unmetered = False
            self._meter()
            return
        # Without an engine, a kind that has yet to be planned for is looked out for.
        self.observation = Observation() if self.portfolio.undecided and not self._stepped else None
        if self.seen is None:
            held = Pair(self.portfolio.held_bytes(seen.held_calls), seen.held_bytes)
            self.seen, wrong = self._loop.close(self.decision, held, seen.measured)
            self._waiting |= wrong
            self._log.info("%s", self.describe())
            self.journal.write("observed", step=self.steps, **self.seen.to_json())

    def _tell_again(self) -> None:
        """The first step of a resumed run has shown the blocks of the plan that it took over."""
        assert self.decision is not None
        self._untold = False
        if self.decision.policies.keys().isdisjoint(self.portfolio.kinds):
            self._log.warning("the plan is made anew: no block runs a program that the checkpoint's plan is for")
            return
        self.journal.write("plan", **told(self.decision, self.portfolio, self.steps))
        if self.seen is not None:
            self._log.info("%s", self.describe())

    def describe(self) -> str:
        """The table of the decision in force, with what was observed."""
        assert self.decision is not None
        return decision_table(self.decision, self.portfolio, self.seen)

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
        profiles = {digest: kind.profile for digest, kind in self.portfolio.kinds.items()}
        return RuntimeState(
            portfolio=self.portfolio.state(),
            profiles={**self.profiler.remembered, **profiles},
            decision=self.decision,
            seen=self.seen,
            corrected=self._loop.corrected,
            reason=self._loop.reason,
            unmetered=self._unmetered,
            postponed=self._postponed,
            steps=self.steps,
            meters_after=self.meters_after,
        )

    def restore(self, state: RuntimeState, blocks: Sequence[Mapping[str, Any]]) -> None:
        """Go on from there. All blocks are recorded anew, and those known to the state run by its policies at once."""
        self.abandon()
        self.blocks = Registry(blocks)
        self.portfolio.restore(state.portfolio)
        self.profiler.remembered = state.profiles
        self._loop = Loop(self.portfolio, state.corrected, state.reason)
        self.decision, self.seen = state.decision, state.seen
        self.steps, self.meters_after = state.steps, state.meters_after
        self._unmetered, self._postponed = state.unmetered, state.postponed
        self.tracking, self._untold = False, state.decision is not None
        self._together, self._waiting, self._fitting = set(), set(), set(state.portfolio.together)
        self._passes, self._tracked, self._began_late = {}, set(), False
        self.observation = Observation() if self.seen is None else None

    def _count_calls(self, digests: Collection[str]) -> None:
        for digest in digests:
            kind = self.portfolio.kinds[digest]
            blocks = sum(any(record.kind == digest for record in block.records()) for block in self.blocks.all())
            seen = self.observation.most_alive[digest] if self.observation else 0
            # A kind that has a policy may have run before the observation began.
            kind.count = seen if seen and kind.policies is None else max(kind.count, seen, blocks)
