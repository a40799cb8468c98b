"""Tells the user of plans and of what was observed under them: in the log, and as events of the journal."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace

from ds_adacc.observe.calibration import Observation
from ds_adacc.plan.agreement import Agreement
from ds_adacc.plan.live_sets import TypePolicies
from ds_adacc.plan.plan import Plan
from ds_adacc.plan.ranks import Ranks
from ds_adacc.report.decision import Decision
from ds_adacc.report.journal import Journal
from ds_adacc.report.plan_text import (
    decision_table,
    decisions_here,
    journal_fields,
    line_of_correction,
    line_of_new_plan,
    line_of_observation,
    merge_decisions,
)

_MUCH_MORE = 1.25  # times the bytes without checkpointing


class PlanLog:
    """Logs that there is a plan, and what was observed under it: as a table or, of a later plan, as a line.

    The first plan that stays gets a table, and each one for larger inputs than the tables so far.

    `step` counts the steps that have ended. A plan that is made before any has ended is not training's: the log does
    not tell of it. The journal gets all plans in full, so that `ds_adacc report` can show them.
    """

    def __init__(self, agreement: Agreement, journal: Journal, ranks: Ranks) -> None:
        self._agreement = agreement
        self._journal = journal
        self._ranks = ranks
        self._decisions: list[Decision] = []  # of the plan that was made last
        self._logged: dict[str, TypePolicies] = {}  # the policies logged last, by block type
        self._shown: int | None = None  # bytes without checkpointing, the most of the plans that got a table
        self._is_promised = False
        self._restored: Plan | None = None  # the plan of a checkpoint, until a block has run under it
        self._log = agreement.log

    def resume(self, plan: Plan | None) -> None:
        """A run begins, with this plan of a checkpoint; None: without one."""
        self._restored = plan

    def end_step(self, observation: Observation | None, step: int) -> None:
        """A step has ended. Tell of a checkpoint's plan once a block has run, unless another one is in force by then.

        `observation`: of the plan.
        """
        if self._restored is not None and self._agreement.known_types:
            plan, self._restored = self._restored, None
            self.restored(plan, observation, step)

    def decided(self, plan: Plan, step: int) -> None:
        """A plan was made, and comes into force. Every rank must call: it is for the block types of all of them."""
        self._restored = None
        here = decisions_here(plan, self._agreement)
        if step:
            promises = self._needs_table(plan) and not self._is_promised
            self._is_promised |= promises
            more = ". A table follows after a step under it, or under the next plan" if promises else ""
            self._log.info("step %d: %s%s", step, line_of_new_plan(plan), more)
        self._write(plan, merge_decisions(plan, self._ranks.gather(here)), step)

    def tries(self, step: int) -> None:
        """The step with this number begins, which will take longer than others: it tries the plan."""
        self._log.info("step %d tries the plan: blocks recompute everything, and measure its gradient errors", step)

    def tracks(self, step: int) -> None:
        """The step with this number begins, which will take longer than others: it tries a lossy plan again."""
        text = "step %d is the first tracking step, which tries the plan again: such steps come ever more rarely"
        self._log.once(text, logging.INFO, text, step)

    def observed(self, plan: Plan, observation: Observation, step: int, is_corrected: bool) -> None:
        """The first step under the plan has ended. `is_corrected`: its memory model was wrong, and another follows."""
        if is_corrected:
            self._log.info("step %d: %s", step, line_of_correction(plan, observation))
        elif not self._needs_table(plan):
            is_new = any(self._logged.get(name) != policies for name, policies in plan.policies.items())
            self._log.info("step %d: %s", step, line_of_observation(plan, observation, is_new))
            self._logged |= plan.policies
        else:
            self._show(plan, observation)
        self._journal.write("observed", step=step, **asdict(observation))

    def restored(self, plan: Plan, observation: Observation | None, step: int) -> None:
        """The first step has ended of a run that goes on from a checkpoint with this plan."""
        if all(known.plan is None for known in self._agreement.known_types.values()):
            self._decisions = []
            self._log.warning(
                "the checkpoint's plan is for other blocks or input sizes than those of the first step, so a new plan "
                "is made. Without lossy codecs the losses stay exact; with them they may differ a little"
            )
            return
        self._write(plan, merge_decisions(plan, [decisions_here(plan, self._agreement)]), step)
        if observation is not None:
            self._show(replace(plan, reason="restored from the checkpoint"), observation)

    def _needs_table(self, plan: Plan) -> bool:
        return self._shown is None or plan.without > _MUCH_MORE * self._shown

    def _show(self, plan: Plan, observation: Observation) -> None:
        self._logged |= plan.policies
        self._shown, self._is_promised = max(plan.without, self._shown or 0), False
        self._log.info("%s", decision_table(plan, self._decisions, self._agreement, observation))

    def _write(self, plan: Plan, decisions: list[Decision], step: int) -> None:
        self._decisions = decisions
        self._journal.write("plan", **journal_fields(plan, decisions, step))
