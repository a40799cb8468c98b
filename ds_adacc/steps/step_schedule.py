"""The schedule of steps: which of the coming ones observe, measure, try policies or track, and which only run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


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

    It is the same on all ranks, whatever each rank has observed. Steps are counted from 1.

    `ended`: how many optimizer steps have ended.
    `observe_in`: how many steps come before the one that observes the plan in force. 0: it is the next step; None: it
    has ended.
    `measures`: that step measures peak and seconds. `was_deferred`: it was postponed once.
    `attempts`: how many steps could not measure, because a block was recorded in them.
    `try_from`: the step that puts policies on trial; None: no step does. If it was to observe the plan, the next one
    does.
    `repeats`: how often a plan's trials were repeated, as some did not end.
    `track_from`: the first step that may be a tracking step. `interval`: steps from one tracking step to the next.
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
        kept = StepSchedule(ended=self.ended, track_from=self.track_from, interval=self.interval)
        return replace(kept, observe_in=1, try_from=self.ended + 1) if tries else replace(kept, observe_in=0)

    def with_trials_again(self) -> StepSchedule:
        """The schedule where policies still await their trial: once more in the next step, then after 2, 4 ... steps.

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

    def next_purpose(self, tracks: bool) -> Purpose:
        """What the next step under a plan is for, the same on all ranks: RUN if nothing is due.

        `tracks`: whether there are tracking steps.
        """
        if self.tries:
            return Purpose.TRY
        if self.observe_in is not None:
            return Purpose.MEASURE if self.observe_in == 0 and self.measures else Purpose.OBSERVE
        return Purpose.TRACK if tracks and self.ended + 1 >= self.track_from else Purpose.RUN
