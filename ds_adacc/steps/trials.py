"""Measure gradient errors in the calls of a step: those of a new block type's codecs, and those of policies on trial.

A lossy policy comes into force on a block only after it was measured on that block and found within
`adacc.max_gradient_error` (Rule T5). Until then the block is *on trial*: its calls hold everything exactly, at the
bytes of full checkpointing. Its first call in a step of trials, or in a tracking step, measures the policy in backward
(`profile/probe.py`).

A tracking step puts all lossy policies in force on trial again. So its peak is that of full checkpointing too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ds_adacc import planner
from ds_adacc.execute.block import Block
from ds_adacc.execute.block_registry import BlockRegistry
from ds_adacc.execute.bound_policy import BoundPolicy
from ds_adacc.execute.variant import Trial, Variant
from ds_adacc.plan.agreement import Agreement
from ds_adacc.plan.approvals import BlockKey
from ds_adacc.plan.block_type import KnownType
from ds_adacc.profile.gradient_error import CodecErrors, PolicyError, measure_codecs, measure_policy
from ds_adacc.profile.probe import Measure, Probe
from ds_adacc.profile.unmeasurable import why_unmeasurable
from ds_adacc.program.recording import Recording
from ds_adacc.record.capture import Capture
from ds_adacc.steps.binder import Binder
from ds_adacc.steps.pending_live_sets import PendingLiveSets
from ds_adacc.steps.step import Step
from ds_adacc.steps.step_schedule import Purpose


class Trials:
    """Knows what is to be measured in a call, and collects the results.

    `pending`: is told of block types whose codecs were measured only after a plan was made. `tracks`: whether there are
    tracking steps. `remembered`: the codecs' errors, by block type, of the run that this one resumes.
    """

    def __init__(
        self,
        agreement: Agreement,
        binder: Binder,
        pending: PendingLiveSets,
        tracks: bool,
        remembered: Mapping[str, CodecErrors],
    ) -> None:
        self._agreement = agreement
        self._binder = binder
        self._pending = pending
        self._tracks = tracks
        self.remembered = remembered

    @property
    def max_error(self) -> float | None:
        return self._agreement.approvals.max_error

    def admit(self, known: KnownType, recording: Recording, captured: Capture) -> str | None:
        """Find out whether errors of a new block type can be measured. If not, return why (Rule P5)."""
        if self.max_error is None or not known.offers_lossy:
            return None
        errors = self.remembered.get(known.recording.digest)
        if errors is not None:
            known.errors, known.errors_are_measured = errors, True
            return None
        reason = why_unmeasurable(captured.output, captured.inputs, recording)
        if reason is not None:
            known.errors_are_measured = True
        return reason

    def probe(self, block: Block, variant: Variant, inputs: Sequence[torch.Tensor], step: Step) -> Probe | None:
        """A probe for a call of this variant of the block, if something is to be measured in it in this step.

        The codecs of a block type are measured in one call of it. Policies are measured in a step of trials or a
        tracking step only: no other step takes notice of the result.
        """
        if self.max_error is None:
            return None
        known, trial = self._agreement.known_types[variant.digest], variant.trial
        if trial is not None and (trial.has_begun or step.purpose not in (Purpose.TRY, Purpose.TRACK)):
            trial = None
        asks_for_codecs = self._asks_for_codecs(variant, known, step) and variant.digest not in step.probed
        if trial is None and not asks_for_codecs:
            return None
        if asks_for_codecs:
            step.begin_codecs(variant.digest)
        if trial is not None:
            step.begin_trial(block, self._agreement.origin(variant.digest), trial)

        def bind(policy: planner.Policy) -> BoundPolicy:
            return self._binder.bound_to_measure(variant, known, policy)

        def study(measure: Measure, is_training: bool) -> None:
            if asks_for_codecs:
                # Errors under a random gradient serve until they are measured under one of training's.
                with self._agreement.budget.aside():
                    known.errors, known.errors_are_measured = measure_codecs(measure, known.profile, bind), is_training
                if known.plan is not None and is_training:
                    self._pending.note_late(variant.digest, "gradient errors were measured after the plan")
            if trial is not None and is_training:
                trial.result = measure_policy(measure, trial.profile, trial.policy, bind, self.max_error)

        step.current_pass.entrances.add(known.entrance)
        return Probe(variant.recording, inputs, study, known.entrance)

    def _asks_for_codecs(self, variant: Variant, known: KnownType, step: Step) -> bool:
        """Whether the errors of the type's codecs are unknown, and the variant holds everything exactly.

        Training's gradient may be zero for long. Until it is not, errors under a random gradient serve. Then further
        calls measure; under a plan only in the steps that measure anyway, if there are tracking steps. No rank can
        restore an input alone of which the ranks hold shares, so such a call measures nothing.
        """
        if not self._agreement.lacks_errors(known):  # as in most calls; to look through the policy takes longer
            return False
        if self._agreement.placement(known).group is not None and not step.recomputes:
            return False
        measures = step.purpose in (Purpose.TRY, Purpose.TRACK)
        if known.errors.coarsest and self._tracks and known.plan is not None and not measures:
            return False
        assert variant.policy is not None  # it is about to run it
        return known.plan is None or not variant.policy.lossy_values(known.plan.spec.profile)

    def unfinished(self, blocks: BlockRegistry) -> list[tuple[Block, Trial]]:
        """The trials of policies that may not run before they are measured, which this step has not done.

        The blocks were not called, say, or their gradients were not finite.
        """
        approvals, key_of = self._agreement.approvals, self._agreement.block_key
        trials = ((block, variant.digest, variant.trial) for block, variant in blocks.variants())
        unfinished = [(b, of, trial) for b, of, trial in trials if trial is not None and trial.result is None]
        return [(b, trial) for b, of, trial in unfinished if not approvals.knows(key_of(b, of), trial.policy)]

    def results(self, step: Step) -> list[tuple[BlockKey, str, PolicyError]]:
        """The errors of the policies that were measured in the step, each with its block and this block's name."""
        index = self._agreement.forward_order.index
        done = ((b, (of, index(b, of)), trial.result) for b, of, trial in step.tried if trial.result is not None)
        return [(key, block.name, found) for block, key, found in done if key[1] is not None]
