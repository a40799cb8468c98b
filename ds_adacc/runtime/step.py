"""The purpose of one optimizer step, and what has been observed in it."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from ds_adacc.execute.block import Block, Trial
from ds_adacc.execute.call import Forward
from ds_adacc.plan.forward_order import ForwardPass
from ds_adacc.plan.live_sets import LiveSet
from ds_adacc.profile.memory_trace import is_in_backward
from ds_adacc.program.schema import tensors_in
from ds_adacc.rectify.observer import Observer
from ds_adacc.rectify.step_profiler import StepProfiler


class Purpose(Enum):
    """The purpose of a step. It is chosen when the step before it has ended."""

    TRY = "try"  # blocks recompute while the gradient errors of their new policies are measured
    OBSERVE = "observe"  # some blocks may have no policy yet: count the calls and bytes alive at once
    MEASURE = "measure"  # the first step under a new plan: count the same, and measure peak and seconds
    TRACK = "track"  # a tracking step: find the outliers, measure gradient errors, verify one recording of each type
    RUN = "run"  # the plan is in force, and nothing is observed


_LONGEST_PAUSE = 1024  # steps between trials that are repeated
_MOST_ATTEMPTS = 8  # to measure a plan: blocks that are recorded at each size might record in every step


@dataclass(frozen=True)
class StepSchedule:
    """The purposes of the coming steps. A checkpoint saves it, so a resumed run has the same steps as the original.

    It is the same on all ranks, whatever each rank has observed. `ended` counts optimizer steps. One step observes the
    plan in force: `observe_in` is the number of steps before it (0: it is the next step; None: it has ended).
    `measures` says whether that step measures peak and seconds, and `was_deferred` whether it has been postponed once.
    `attempts` counts the steps that could not measure because a block was recorded in them.
    `try_from` is the number of the step, counted from 1, that puts policies on trial; None: no step does. What it is to
    observe waits for the step after it. `repeats` counts how often a plan's trials were repeated: some did not end.
    `track_from` is the number of the first step, counted from 1, that may be a tracking step. `interval` is the number
    of steps from one tracking step to the next.
    """

    ended: int = 0
    observe_in: int | None = None
    measures: bool = True
    was_deferred: bool = False
    attempts: int = 0
    try_from: int | None = None
    repeats: int = 0
    track_from: int = 1
    interval: int = 1

    def with_step_ended(self) -> StepSchedule:
        """The schedule after one more optimizer step."""
        return replace(self, ended=self.ended + 1)

    def with_new_plan(self, tries: bool) -> StepSchedule:
        """The schedule after a new plan: the next step observes and measures it; if it `tries`, trials come first."""
        try_from = self.ended + 1 if tries else None
        return replace(
            self,
            observe_in=1 if tries else 0,
            measures=True,
            was_deferred=False,
            attempts=0,
            try_from=try_from,
            repeats=0,
        )

    def with_trials_again(self) -> StepSchedule:
        """The schedule where policies still await their trial: the next step repeats it, then one 2, 4 ... 1024 later.

        A block may be called in few steps, or the gradients of many may overflow. A step of trials takes long.
        """
        if self.try_from is not None:
            return self
        pause = min(2**self.repeats, _LONGEST_PAUSE)
        observe_in = 1 if self.observe_in == 0 and pause == 1 else self.observe_in
        return replace(self, try_from=self.ended + pause, repeats=self.repeats + 1, observe_in=observe_in)

    @property
    def tries(self) -> bool:
        """Whether the next step puts policies on trial."""
        return self.try_from is not None and self.ended + 1 >= self.try_from

    def with_state_saved(self) -> StepSchedule:
        """The schedule after the state was saved. A measuring step that is next is postponed by one step.

        If it was postponed before, it stays the next step, but it observes without measuring. The reason: a resumed run
        records its blocks in its first step, so it cannot measure in that step. The run that continues does the same,
        so that both runs stay equal.
        """
        if self.observe_in != 0 or not self.measures:
            return self
        return replace(self, measures=False) if self.was_deferred else replace(self, observe_in=1, was_deferred=True)

    def after_observation(self) -> StepSchedule:
        """The schedule after a step under the plan: a postponed observation is next; what was due is done."""
        was_tried = self.try_from is not None and self.ended >= self.try_from
        observe_in = 0 if self.observe_in == 1 else None
        return replace(self, observe_in=observe_in, try_from=None if was_tried else self.try_from)

    @property
    def may_measure_again(self) -> bool:
        """Whether a step that could not measure the plan is followed by another attempt."""
        return self.attempts + 1 < _MOST_ATTEMPTS

    def with_measurement_again(self) -> StepSchedule:
        """The schedule after a step that was to measure the plan and could not: the next step does."""
        return replace(self, observe_in=0, attempts=self.attempts + 1)

    def after_tracking(self, changed: bool, errors_rise: bool, longest: int) -> StepSchedule:
        """The schedule after a tracking step.

        The interval doubles up to `longest`. It is 1 if a policy changed, and half if a gradient error rises.
        """
        interval = 1 if changed else max(1, self.interval // 2) if errors_rise else min(2 * self.interval, longest)
        return replace(self, interval=interval, track_from=self.ended + interval)

    def no_longer_than(self, longest: int) -> StepSchedule:
        """The schedule of a resumed run whose section limits the interval of tracking steps to `longest`."""
        interval = min(self.interval, longest)
        return replace(self, interval=interval, track_from=min(self.track_from, self.ended + interval))

    def is_anything_due(self, tracks: bool) -> bool:
        """Whether the ranks must communicate at the end of the next step; `tracks`: a rectifier is enabled."""
        return self.tries or self.observe_in is not None or (tracks and self._is_tracking_due)

    def next_purpose(self, tracks: bool, is_unsettled: bool) -> Purpose:
        """The purpose of the next step under a plan. `is_unsettled`: something on this rank has not been observed.

        All ranks communicate at the end of a tracking step. So what this rank has observed must not decide whether the
        next step is one.
        """
        if self.tries:
            return Purpose.TRY
        if self.observe_in is not None:
            return Purpose.MEASURE if self.observe_in == 0 and self.measures else Purpose.OBSERVE
        if tracks and self._is_tracking_due:
            return Purpose.TRACK
        return Purpose.OBSERVE if is_unsettled else Purpose.RUN

    @property
    def _is_tracking_due(self) -> bool:
        return self.ended + 1 >= self.track_from


class Step:
    """One optimizer step, with all its micro-batches. When it has ended, a new `Step` replaces it.

    Steps that record, measure or try have an `observer` from the start. Any other step gets one when it calls a block
    without a policy, and `is_partly_observed` is then true. `recomputes` says that every block recomputes all that it
    can, so that measuring policies fits where full checkpointing fits. `passes` holds the forward pass observed for
    each live set. `was_cut_short`: measuring was stopped before a backward had ended. `verified` are the block types
    whose recording was verified in this step, `probed` those of which a call measures the errors of the codecs.

    A pass is a forward and its backward. The engine tells when one has ended. Of a backward that it does not run,
    nobody tells: then the pass is over when autograd holds nothing of its calls any more.
    """

    def __init__(self, purpose: Purpose, device: torch.device | None = None, recomputes: bool = False) -> None:
        self.purpose = purpose
        self.recomputes = recomputes
        self.observer: Observer | None = None
        self.is_partly_observed = False
        self.was_cut_short = False
        self.passes: dict[LiveSet, ForwardPass] = {}
        self.verified: set[str] = set()
        self.probed: set[str] = set()
        self._begin_pass()
        if purpose in (Purpose.OBSERVE, Purpose.MEASURE, Purpose.TRY):
            measures = purpose is Purpose.MEASURE and device is not None
            self.observer = Observer(StepProfiler(device) if measures else None)

    @property
    def is_tracking(self) -> bool:
        return self.purpose is Purpose.TRACK

    @property
    def was_observed(self) -> bool:
        """Whether a backward has begun while the observer was present."""
        return self.observer is not None and self.observer.held_bytes is not None

    def note_call(self, digest: str, block: Block, has_policy: bool) -> None:
        """Note a call of a block of this type. A type without a policy makes the step observed."""
        called = self._live.setdefault(digest, set())
        if not is_in_backward():  # of the calls of a backward, few are alive at once
            called.add(block)
        if self.observer is None and not has_policy:
            self.observer, self.is_partly_observed = Observer(), True

    def begin_codecs(self, digest: str) -> None:
        """Note that a call of this pass measures the codecs of the block type."""
        self.probed.add(digest)
        self._probed_in_pass.add(digest)

    def begin_trial(self, trial: Trial) -> None:
        """Note that a call of this pass measures the policy on trial."""
        trial.has_begun = True
        self._begun.append(trial)

    def forward(self) -> Forward:
        """What stands for the current forward. Each of its calls has autograd hold it until its backward."""
        forward = self._forward and self._forward()
        if forward is None:
            forward = Forward(self._note_backward)
            self._forward = weakref.ref(forward)
        return forward

    def _note_backward(self) -> None:
        self._backward_has_begun = True

    def note_plain(self, output: Any) -> None:
        """Note a call without hooks. The graph that leads to its output holds the forward in place of a slot.

        Of an output without a graph nobody sees how long autograd holds what its call has saved.
        """
        nodes = (tensor.grad_fn for tensor in tensors_in(output))
        node = next((node for node in nodes if node is not None), None)
        if node is None:
            self._holds_unknown = True
        else:
            node.register_prehook(self.forward().note_gradient)

    @property
    def is_pass_over(self) -> bool:
        """Whether blocks were called, and autograd holds nothing of their calls any more."""
        if not self._live or self._holds_unknown or (self.observer is not None and self.observer.is_any_alive):
            return False
        return self._forward is None or self._forward() is None

    @property
    def has_backward(self) -> bool:
        """Whether the backward of a call of this forward has begun."""
        return self._backward_has_begun or (self.observer is not None and self.observer.has_backward)

    @property
    def block_types(self) -> Collection[str]:
        """What the current forward has called."""
        return self._live.keys()

    @property
    def is_observed_whole(self) -> bool:
        """Whether the observer has been there from the start."""
        return self.observer is not None and not self.is_partly_observed

    def end_pass(self) -> Mapping[str, Collection[Block]]:
        """Note the end of a forward and its backward. Returns the blocks that it has called, by block type."""
        ran, live_set = self._live, frozenset(self._live)
        self._begin_pass()
        if self.observer is not None:
            seen, known = self.observer.end_pass(), self.passes.get(live_set)
            if live_set and (known is None or len(seen.calls) > len(known.calls)):
                self.passes[live_set] = seen
        return ran

    def drop_pass(self) -> None:
        """Discard what was observed of this forward: no backward has followed it, or a call has failed.

        What its calls were to measure, the next ones measure.
        """
        for trial in self._begun:
            trial.has_begun = trial.result is not None
        self.probed -= self._probed_in_pass
        self._begin_pass()
        if self.observer is not None:
            self.observer.drop_pass()

    def _begin_pass(self) -> None:
        self._live: dict[str, set[Block]] = {}  # the blocks that the current forward has called, by block type
        self._forward: weakref.ref[Forward] | None = None
        self._backward_has_begun = False
        self._begun: list[Trial] = []
        self._probed_in_pass: set[str] = set()
        self._holds_unknown = False  # what autograd holds of some calls of this forward, nobody sees

    def close(self) -> None:
        """Stop measuring."""
        if self.observer is not None:
            self.was_cut_short |= self.observer.is_measuring
            self.observer.close()
