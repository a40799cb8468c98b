"""One optimizer step: its purpose, and what has been observed in it."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from typing import Any

import torch

from ds_adacc.execute.block import Block, Trial
from ds_adacc.execute.call import Forward
from ds_adacc.observe.observer import Observer
from ds_adacc.observe.step_profiler import StepProfiler
from ds_adacc.plan.forward_order import ForwardPass
from ds_adacc.plan.live_sets import LiveSet
from ds_adacc.profile.memory_trace import is_in_backward
from ds_adacc.program.arguments import tensors_in
from ds_adacc.runtime.given_inputs import GivenInputs
from ds_adacc.runtime.step_schedule import Purpose


class Step:
    """One optimizer step, with all its micro-batches. When it has ended, a new `Step` replaces it.

    Steps that record, measure or try have an `observer` from the start. Any other step gets one when it calls a block
    without a policy, and `is_partly_observed` is then true. `recomputes` says that every block recomputes all that it
    can, so that measuring policies fits where full checkpointing fits. `passes` holds the forward pass observed for
    each live set. `was_cut_short`: measuring was stopped before a backward had ended. `verified` are the block types
    whose recording was verified in this step, `probed` those of which a call measures the errors of the codecs.
    `tried`: the trials that a call measures, each with its block, and the block type that was planned for (the origin,
    if the call is of an adopted type). They are kept here, since a plan that is made in the step may put other policies
    on trial, and forget the adopted types.

    `given`: the inputs of the current pass's calls.

    A pass is a forward and its backward. The engine reports the end of a backward that it runs. A pass with another
    backward is over when autograd holds nothing of its calls any more.
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
        self.tried: list[tuple[Block, str, Trial]] = []
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

    def begin_trial(self, block: Block, origin: str, trial: Trial) -> None:
        """Note that a call of this pass measures the policy on trial. `origin`: as of `Agreement.origin`."""
        trial.has_begun = True
        self.tried.append((block, origin, trial))
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

        If the output has no graph, nothing shows when autograd frees what the call has saved.
        """
        nodes = (tensor.grad_fn for tensor in tensors_in(output))
        node = next((node for node in nodes if node is not None), None)
        if node is None:
            self._holds_unknown = True
        else:
            node.register_prehook(self.forward().note_backward)

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
        self.given = GivenInputs()
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
