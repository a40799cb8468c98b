"""Tells the user of plans and of what was observed under them: in the log, and as events of the journal."""

from __future__ import annotations

from dataclasses import asdict, replace

from ds_adacc.log import get_logger
from ds_adacc.plan.agreement import Agreement
from ds_adacc.plan.plan import Plan
from ds_adacc.rectify.calibration import Seen
from ds_adacc.report.journal import Journal
from ds_adacc.report.table import corrected_in_a_line, decision_table, in_a_line, told


class PlanLog:
    """Logs the first plan that stays as a table, and each other one as a line. `step` counts the steps that have ended.

    The journal gets all of them in full, so that `ds_adacc report` can show them.
    """

    def __init__(self, agreement: Agreement, journal: Journal) -> None:
        self._agreement = agreement
        self._journal = journal
        self._shown: Plan | None = None  # the one told last
        self._log = get_logger()

    def decided(self, plan: Plan, step: int) -> None:
        """A plan was made, and comes into force."""
        self._journal.write("plan", **told(plan, self._agreement, step))

    def observed(self, plan: Plan, seen: Seen, step: int, is_corrected: bool) -> None:
        """The first step under the plan has ended. `is_corrected`: its memory model was wrong, and another follows."""
        if is_corrected:
            self._log.info("step %d: %s", step, corrected_in_a_line(plan, seen))
        elif self._shown is not None:
            is_new = plan.policies != self._shown.policies
            self._shown = plan
            self._log.info("step %d: %s", step, in_a_line(plan, seen, is_new))
        else:
            self._show(plan, seen)
        self._journal.write("observed", step=step, **asdict(seen))

    def restored(self, plan: Plan, seen: Seen | None, step: int) -> None:
        """The first step has ended of a run that goes on from a checkpoint with this plan."""
        if plan.policies.keys().isdisjoint(self._agreement.known_types):
            self._log.warning(
                "the checkpoint's plan is for other blocks or input sizes than those of the first step, so a new plan "
                "is made. Without lossy codecs the losses stay exact; with them they may differ a little"
            )
            return
        self.decided(plan, step)
        if seen is not None:
            self._show(replace(plan, reason="restored from the checkpoint"), seen)

    def _show(self, plan: Plan, seen: Seen) -> None:
        self._shown = plan
        self._log.info("%s", decision_table(plan, self._agreement, seen))
