"""The plan of a run: what is in force, what was observed of it, what waits for one, and how it is changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from ds_adacc.execute.block_registry import BlockRegistry
from ds_adacc.observe.calibration import Calibration, Observation
from ds_adacc.plan.coordinator import Coordinator
from ds_adacc.plan.correction import Correction
from ds_adacc.plan.live_sets import LiveSet
from ds_adacc.plan.peak_estimate import largest_pass
from ds_adacc.plan.plan import Plan
from ds_adacc.plan.repeated_collectives import Repeatable
from ds_adacc.plan.solve import Forgiven
from ds_adacc.report.journal import Journal
from ds_adacc.report.plan_log import PlanLog
from ds_adacc.sizes.new_sizes import NewSizes
from ds_adacc.steps.binder import Binder
from ds_adacc.steps.pending_live_sets import PendingLiveSets
from ds_adacc.steps.policy_chooser import PolicyChooser
from ds_adacc.steps.saved_state import State
from ds_adacc.steps.step import Step
from ds_adacc.steps.trials import Trials


class Planning:
    """The plan of a run that begins, or continues from a saved state. Only `decide` makes another, between two steps.

    `plan`: the plan in force. `observation`: of the first step under it; None before that step has ended.
    `has_run_a_plan`: a step has run the policies of any plan, without trials; the same on all ranks.
    `schedule`: of the coming steps. `pending`: what waits for a plan.
    `tracks`: there are tracking steps.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        binder: Binder,
        blocks: BlockRegistry,
        journal: Journal,
        plan_log: PlanLog,
        tracks: bool,
        state: State,
    ) -> None:
        self.agreement = agreement = coordinator.agreement
        self.ranks = coordinator.ranks
        self.blocks = blocks
        self.journal = journal
        self.plan_log = plan_log
        self.plan: Plan | None = state.plan
        self.observation: Observation | None = state.observation
        self.has_run_a_plan = state.has_run_a_plan
        self.schedule = state.schedule
        if tracks:
            self.schedule = self.schedule.no_longer_than(agreement.config.rectifier.max_interval)
        self.calibration = Calibration(agreement.log, state.corrected)
        self.new_sizes = NewSizes(agreement, blocks)
        self.pending = PendingLiveSets(agreement, self.new_sizes)
        self.trials = Trials(agreement, binder, self.pending, tracks, state.errors)
        self.chooser = PolicyChooser(blocks, agreement, binder)
        self._coordinator = coordinator
        self._binder = binder

    @property
    def device(self) -> torch.device | None:
        """The device on which the blocks run; None before any has run."""
        return self._binder.device

    def plan_pending(self, step: Step) -> None:
        """Plan for the live sets that wait for a plan. The first plan must fit the budget.

        A live set whose programs are planned for at another size adopts policies from that plan. If none fit, it waits.
        """
        is_first = self.plan is None
        live_sets, reason, corrections = self.pending.take()
        if is_first:
            reason = "first step recorded"
        elif self.agreement.undecided:
            reason = "new shapes or programs recorded"
        largest, others = self.new_sizes.origins.largest(live_sets)
        self.decide(step, largest, reason, Forgiven.OUT_OF_TIME if is_first else Forgiven.ALL, corrections=corrections)
        # The plan has made some sizes be forgotten that had adopted policies. They adopt anew when they come again.
        known = [names for names in others if names <= self.agreement.known_types.keys()]
        adopter, passes = self.new_sizes.adopter, (largest_pass(self.agreement, names) for names in known)
        self.pending.add((frozenset(alive) for alive in passes if not adopter.adopt_for_pass(alive)), reason)
        self.chooser.choose_policies({name for names in known for name in names}, step)

    def decide(
        self,
        step: Step,
        live_sets: Collection[LiveSet],
        reason: str,
        forgiven: Forgiven = Forgiven.NONE,
        capacity: Mapping[str, Mapping[int, int]] | None = None,
        corrections: Mapping[str, Correction] | None = None,
    ) -> Plan:
        """Agree with the other ranks on policies for these live sets, and put them in force on this rank.

        `step`: the one that has ended. Its passes tell the order of the blocks. Raises errors of the solver that are
        not `forgiven`.
        """
        for forward_pass in step.passes.values():
            self.agreement.arrange(forward_pass)
        step.passes = {}
        repeatable = Repeatable.of(self.blocks.all(), self.agreement.forward_order.names)
        plan = self._coordinator.decide(live_sets, self.device, reason, forgiven, capacity, corrections, repeatable)
        self.plan, self.observation = plan, None
        self.pending.forget_planned()
        self.schedule = self.schedule.with_new_plan(self.agreement.has_trials(plan))
        adopted = self.new_sizes.adopter.adopt_from_plan(plan)
        self.pending.forget(self.new_sizes.forget_adopted(all_but={*plan.policies, *adopted}))
        together = {name: k for name, k in self.agreement.known_types.items() if k.recording.repeats_collectives}
        for name, known in together.items():  # at other sizes too, they run what all ranks have agreed on now
            self.new_sizes.adopter.adopt_for_type(known, name)
        self.chooser.choose_policies([*plan.policies, *adopted, *together], step)
        self.new_sizes.forget_unused()
        self.plan_log.decided(plan, self.schedule.ended)
        return plan
