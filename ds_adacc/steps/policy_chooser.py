"""Which policy each variant of a block runs now: the planned one, or full recomputation while that one is on trial."""

from __future__ import annotations

from collections.abc import Iterable

from ds_adacc import planner
from ds_adacc.execute.block import Block
from ds_adacc.execute.block_registry import BlockRegistry
from ds_adacc.execute.input_placement import InputPlacement
from ds_adacc.execute.variant import Trial, Variant
from ds_adacc.plan.agreement import Agreement
from ds_adacc.plan.approvals import BlockKey
from ds_adacc.steps.binder import Binder
from ds_adacc.steps.step import Step


class PolicyChooser:
    """Chooses what the variants of the blocks run."""

    def __init__(self, blocks: BlockRegistry, agreement: Agreement, binder: Binder) -> None:
        self._blocks = blocks
        self._agreement = agreement
        self._binder = binder

    def choose_policies(self, digests: Iterable[str], step: Step) -> None:
        """Choose what all variants of these block types run, from the next call of each on."""
        changed = set(digests)
        for block, variant in self._blocks.variants():
            if variant.digest in changed:
                self.choose_policy(block, variant, step)
        if not step.recomputes and not step.is_tracking:  # for a short time some blocks do not run their policies
            self._reserve_host_memory()

    def _reserve_host_memory(self) -> None:
        """Get pinned memory for what is offloaded now: it takes long, and the next step may be one that is measured."""
        types = self._agreement.known_types
        last: dict[Block, Variant] = {}  # of each block, the variant that it ran last: one at a time offloads
        for block, variant in self._blocks.variants():
            if self._agreement.inputs.on_host or types[variant.digest].offloads:
                last.setdefault(block, variant)
        self._binder.reserve((variant, types[variant.digest].calls_per_block) for variant in last.values())

    def choose_policy(self, block: Block, variant: Variant, step: Step) -> None:
        """Have the variant run the policy of its block, or put that on trial.

        A policy is on trial if the block may not run it yet, and in a tracking step if it is lossy.
        """
        agreement = self._agreement
        known = agreement.known_types[variant.digest]
        if variant.recording.repeats_collectives:
            # Not even in a step of trials may it depend on what this rank alone knows.
            policy = agreement.repeated_policy(known.profile, block.name)
            self._binder.set_policy(variant, known, policy, InputPlacement())
            return
        origin, index = key = agreement.block_key(block, variant.digest)
        policy, inputs = known.policy(index), agreement.placement(known)
        is_tried_again = step.is_tracking and agreement.is_lossy(block, variant.digest)
        is_permitted = known.plan is None or agreement.permits(variant.digest, index)
        on_trial = is_tried_again or not is_permitted
        trial = self._trial(variant, key, policy, known.in_force.spec.profile) if on_trial else None
        variant.trial = trial or self._trial_of_origin(variant, origin, index)
        recomputes, lacks_errors = on_trial or step.recomputes, agreement.lacks_errors(known)
        if recomputes or (lacks_errors and inputs.group is None):
            inputs = InputPlacement()  # a probe must find the inputs as they were given, without a collective
        if recomputes or (known.plan is None and lacks_errors):
            # A probe finds all values exactly, at the bytes of full checkpointing.
            policy = planner.recompute_policy(known.profile)
        self._binder.set_policy(variant, known, policy, inputs)

    def _trial(self, variant: Variant, key: BlockKey, policy: planner.Policy, profile: planner.Profile) -> Trial | None:
        """A trial of the policy, which was made for `profile`, unless it is rejected already.

        A call that does not know a value's outlier channels retains the value. Its error would be that of another
        policy, so it does not try this one. Calls at other sizes measure it.
        """
        if key[1] is None or self._agreement.approvals.is_rejected(key, policy):
            return None
        return Trial(policy, profile) if self._binder.has_all_losses(variant, policy, profile) else None

    def _trial_of_origin(self, variant: Variant, origin: str, index: int | None) -> Trial | None:
        """A trial of the policy that the block runs at larger sizes, if it runs another one at these sizes.

        Otherwise a policy that awaits its trial would wait until a call of the larger size happens to be in that step.
        """
        agreement = self._agreement
        if origin == variant.digest or origin not in agreement.type_plans or agreement.permits(origin, index):
            return None
        own, larger = agreement.type_plans[variant.digest], agreement.type_plans[origin]
        if own.is_lossy(index):
            return None
        return self._trial(variant, (origin, index), larger.policy(index), larger.spec.profile)
