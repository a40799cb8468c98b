"""One optimizer step: its purpose, and what has been observed in it."""

from __future__ import annotations

import torch

from ds_adacc.execute.alive_calls import AliveCalls
from ds_adacc.execute.block import Block
from ds_adacc.execute.variant import Trial
from ds_adacc.observe.observer import Observer
from ds_adacc.observe.step_profiler import StepProfiler
from ds_adacc.plan.forward_order import ForwardPass
from ds_adacc.plan.live_sets import LiveSet
from ds_adacc.steps.current_pass import CalledByType, CurrentPass
from ds_adacc.steps.step_schedule import Purpose


class Step:
    """One optimizer step, with all its micro-batches. When it has ended, a new `Step` replaces it.

    `recomputes`: every block recomputes all that it can, so that measuring policies fits where full checkpointing fits.
    `is_quiet`: nothing is due in it on any rank.
    `observer`: a step that records, measures or tries has one from the start. Another step gets one when it calls a
    block without a policy, and `is_partly_observed` is true then.
    `current_pass`: the forward and backward that run now. The engine tells of the end of a backward that it runs.
    Another pass is over when autograd holds nothing of its calls any more.
    `passes`: by live set, the forward pass that was observed.
    `was_cut_short`: measuring was stopped before a backward had ended.
    `verified`: the block types whose recording was verified in this step.
    `probed`: the block types of which a call measures the errors of the codecs.
    `tried`: the trials that a call measures, each with its block, and the block type that was planned for (the origin,
    if the call is of an adopted type). They are kept here, since a plan that is made in the step may put other policies
    on trial, and forget the adopted types.
    """

    def __init__(
        self,
        purpose: Purpose,
        device: torch.device | None = None,
        recomputes: bool = False,
        is_quiet: bool = False,
    ) -> None:
        self.purpose = purpose
        self.recomputes = recomputes
        self.is_quiet = is_quiet
        self.observer: Observer | None = None
        self.is_partly_observed = False
        self.was_cut_short = False
        self.passes: dict[LiveSet, ForwardPass] = {}
        self.verified: set[str] = set()
        self.probed: set[str] = set()
        self.tried: list[tuple[Block, str, Trial]] = []
        self._alive_calls = AliveCalls()
        self.current_pass = CurrentPass(self._alive_calls)
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
        self.current_pass.note_call(digest, block)
        if self.observer is None and not has_policy:
            self.observer, self.is_partly_observed = Observer(), True

    def begin_codecs(self, digest: str) -> None:
        """Note that a call of this pass measures the codecs of the block type."""
        self.probed.add(digest)
        self.current_pass.probed.add(digest)

    def begin_trial(self, block: Block, origin: str, trial: Trial) -> None:
        """Note that a call of this pass measures the policy on trial. `origin`: as of `Agreement.origin`."""
        trial.has_begun = True
        self.tried.append((block, origin, trial))
        self.current_pass.trials.append(trial)

    @property
    def is_pass_over(self) -> bool:
        """Whether the pass has called blocks, and autograd holds nothing of their calls any more."""
        return self.current_pass.has_begun and not self.current_pass.is_held

    @property
    def is_fully_observed(self) -> bool:
        """Whether the observer has been there from the start."""
        return self.observer is not None and not self.is_partly_observed

    def end_pass(self) -> CalledByType:
        """Note the end of a forward and its backward. Returns what it has called, by block type."""
        for entrance in self.current_pass.entrances:
            entrance.end_pass()
        ran, self.current_pass = self.current_pass.end(), CurrentPass(self._alive_calls)
        if self.observer is not None:
            live_set = frozenset(ran)
            seen, known = self.observer.end_pass(), self.passes.get(live_set)
            if live_set and (known is None or len(seen.calls) > len(known.calls)):
                self.passes[live_set] = seen
        return ran

    def drop_pass(self) -> None:
        """Discard what was observed of this forward: no backward has followed it, or a call has failed.

        What its calls were to measure, the next ones measure.
        """
        for trial in self.current_pass.trials:
            trial.has_begun = trial.result is not None
        self.probed -= self.current_pass.probed
        self._alive_calls.end_pass()
        self.current_pass = CurrentPass(self._alive_calls)
        if self.observer is not None:
            self.observer.drop_pass()

    def restarted(self, device: torch.device | None) -> Step:
        """Close the step, and return one that observes anew. What has been verified and measured in it counts."""
        self.drop_pass()
        self.close()
        step = Step(self.purpose, device, self.recomputes, self.is_quiet)
        step.passes, step.verified, step.probed, step.tried = self.passes, self.verified, self.probed, self.tried
        return step

    def close(self) -> None:
        """Stop measuring."""
        if self.observer is not None:
            self.was_cut_short |= self.observer.is_measuring
            self.observer.close()
