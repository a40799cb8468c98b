"""What one optimizer step is for, and what has been seen in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch

from ds_adacc.plan.forward_order import ForwardPass
from ds_adacc.plan.plan import LiveSet
from ds_adacc.rectify.observer import Observer
from ds_adacc.rectify.step_profiler import StepProfiler


class Purpose(Enum):
    """The states of a run. Every step has one, chosen when the step before it has ended."""

    RECORD = "record"  # blocks without a policy are expected: count the calls and bytes alive at once
    MEASURE = "measure"  # the first step under a new plan: count, and measure peak and seconds too
    TRACK = "track"  # a tracking step: look at the outliers, and verify one recording of each block type anew
    RUN = "run"  # the plan is in force, and nothing is looked at


@dataclass(frozen=True)
class StepSchedule:
    """What the coming steps are for. A checkpoint holds it, so that a resumed run goes on step for step.

    It is the same on all ranks, whatever each has seen. `ended` counts optimizer steps. `look_in` is how many pass
    before the one that looks at the plan in force: 0 is the next step, None says that it has been. `measures` says
    whether peak and seconds are measured then, `was_deferred` that the look has been put off once. `track_from` is the
    first step, from 1, that may be a tracking step; `interval` is the distance to the one after it.
    """

    ended: int = 0
    look_in: int | None = None
    measures: bool = True
    was_deferred: bool = False
    track_from: int = 1
    interval: int = 1

    def with_step_ended(self) -> StepSchedule:
        """One more optimizer step has ended."""
        return replace(self, ended=self.ended + 1)

    def with_new_plan(self) -> StepSchedule:
        """The next step looks at a new plan, and measures it."""
        return replace(self, look_in=0, measures=True, was_deferred=False)

    def with_state_saved(self) -> StepSchedule:
        """The state was saved just before the measuring step: put that off by a step, or the second time look only.

        A resumed run records its blocks in its first step, and can measure nothing in it. A run that goes on does the
        same, so that both stay equal.
        """
        if self.look_in != 0 or not self.measures:
            return self
        return replace(self, measures=False) if self.was_deferred else replace(self, look_in=1, was_deferred=True)

    def after_look(self) -> StepSchedule:
        """A step under the plan has ended: a look that was put off is next; one that was due is over."""
        return replace(self, look_in=0 if self.look_in == 1 else None)

    def after_tracking(self, changed: bool, longest: int) -> StepSchedule:
        """A tracking step has ended: the interval doubles up to `longest`, and is 1 again if a policy has changed."""
        interval = 1 if changed else min(2 * self.interval, longest)
        return replace(self, interval=interval, track_from=self.ended + interval)

    def no_longer_than(self, longest: int) -> StepSchedule:
        """The schedule of a resumed run whose section allows `longest` steps between two tracking steps."""
        interval = min(self.interval, longest)
        return replace(self, interval=interval, track_from=min(self.track_from, self.ended + interval))

    @property
    def is_tracking_due(self) -> bool:
        """Whether the next step may be a tracking step."""
        return self.ended + 1 >= self.track_from


class Step:
    """One optimizer step, with all its micro-batches. A new one is made when it has ended.

    `observer` is there in steps that record or measure, and in any other from the moment when a block without a policy
    is met; then `is_partly_observed`. `live` are the block types called in the forward under way, `passes` what was
    seen of each live set, `verified` the block types whose recording was verified in this step.
    """

    def __init__(self, purpose: Purpose, device: torch.device | None = None) -> None:
        self.purpose = purpose
        self.observer: Observer | None = None
        self.is_partly_observed = False
        self.live: set[str] = set()
        self.passes: dict[LiveSet, ForwardPass] = {}
        self.verified: set[str] = set()
        if purpose in (Purpose.RECORD, Purpose.MEASURE):
            measures = purpose is Purpose.MEASURE and device is not None
            self.observer = Observer(StepProfiler(device) if measures else None)

    @property
    def is_tracking(self) -> bool:
        return self.purpose is Purpose.TRACK

    @property
    def was_observed(self) -> bool:
        """Whether the observer has seen a backward begin."""
        return self.observer is not None and self.observer.held_bytes is not None

    def note_call(self, block_type: str, has_policy: bool) -> None:
        """A block of this type is called."""
        self.live.add(block_type)
        if self.observer is None and not has_policy:
            self.observer, self.is_partly_observed = Observer(), True

    def end_pass(self) -> LiveSet:
        """A forward and its backward have ended. Returns the block types that were alive together, maybe none."""
        live_set, self.live = frozenset(self.live), set()
        if self.observer is not None:
            seen, known = self.observer.end_pass(), self.passes.get(live_set)
            if live_set and (known is None or len(seen.calls) > len(known.calls)):
                self.passes[live_set] = seen
        return live_set

    def drop_pass(self) -> None:
        """A call has failed: what was seen of this forward is of no use."""
        self.live.clear()
        if self.observer is not None:
            self.observer.restart()

    def close(self) -> None:
        """Stop measuring."""
        if self.observer is not None:
            self.observer.close()
