"""What follows from a step of trials or a tracking step: policies come into force, or a new plan is made.

All ranks call these functions at the end of the same steps, and decide alike.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any, Protocol

from ds_adacc import planner
from ds_adacc.execute.block import Block, Record
from ds_adacc.execute.blocks import Registry
from ds_adacc.log import get_logger
from ds_adacc.plan.approvals import BlockKey
from ds_adacc.plan.coordinator import Coordinator
from ds_adacc.plan.plan import LiveSet, Plan, Policies
from ds_adacc.plan.ranks import Ranks
from ds_adacc.profile.gradient_error import PolicyError
from ds_adacc.rectify.rectifier import Rectifier, Review
from ds_adacc.report.journal import Journal
from ds_adacc.runtime.step import StepSchedule
from ds_adacc.runtime.trials import Trials


class StepController(Protocol):
    """The part of `step_controller.StepController` that is needed here."""

    coordinator: Coordinator
    trials: Trials
    blocks: Registry
    ranks: Ranks
    journal: Journal
    rectifier: Rectifier | None
    plan: Plan | None
    schedule: StepSchedule
    has_run_a_plan: bool

    def decide(self, live_sets: Collection[LiveSet], reason: str, *args: Any, **kwargs: Any) -> Plan: ...

    def bind(self, block: Block, record: Record, *, on_trial: bool) -> None: ...

    def rebind(self, digest: str) -> None: ...


def conclude_trials(controller: StepController) -> None:
    """Put the policies in force that keep the bound on the gradient error, and plan again for the other blocks.

    Raises planner.InfeasibleBudget if no plan was in force before and none fits both the budget and the bound.
    """
    rejected = _judge(controller)
    if rejected:
        step, reason = controller.schedule.ended, why_rejected(controller, rejected)
        live_sets = controller.coordinator.partners(sorted({digest for digest, _ in rejected}))
        try:
            controller.decide(live_sets, f"step {step}: {reason}")
        except (planner.InfeasibleBudget, planner.NoSolutionInTime) as error:
            if not controller.has_run_a_plan:
                raise
            _leave_exact(step, reason, error)
    _rebind_all(controller)


def rectify(controller: StepController) -> Review:
    """Act on a tracking step: plan again if outliers or gradient errors say so; else use the channels last found."""
    coordinator, step = controller.coordinator, controller.schedule.ended
    before = coordinator.errors_in_force()
    rejected = _judge(controller)
    after = coordinator.errors_in_force()
    verdict = controller.rectifier.judge([record for _, record in controller.blocks.records()], coordinator)
    digests = sorted({*verdict.drifted, *(digest for digest, _ in rejected)})
    review = Review()
    if digests:
        reason = why_rejected(controller, rejected) if rejected else verdict.reason
        review = _replan(controller, digests, reason, verdict.capacity, must_change=bool(rejected))
        controller.journal.write("rectifier", step=step, reason=reason, **asdict(review))
    _rebind_all(controller)
    drift = controller.rectifier.config.drift
    has_risen = any(error > before[key] * (1 + drift) for key, error in after.items() if key in before)
    longest = controller.rectifier.config.max_interval
    controller.schedule = controller.schedule.after_tracking(bool(review.changed or rejected), has_risen, longest)
    return review


def try_what_is_in_force(controller: StepController) -> None:
    """Put the lossy policies in force on trial for a tracking step, as far as the budget has room for it.

    A block on trial holds what full checkpointing would. The blocks whose errors are least recent come first; at least
    one block is tried.
    """
    coordinator = controller.coordinator
    chosen = coordinator.to_try(controller.plan)
    for block, record in controller.blocks.records():
        key = record.block_type, coordinator.forward_order.index(block, record.block_type)
        if key in chosen and record.bound is not None:
            controller.bind(block, record, on_trial=True)


def why_rejected(controller: StepController, rejected: Mapping[BlockKey, PolicyError]) -> str:
    """The block with the largest error, for the log."""
    (digest, index), worst = max(rejected.items(), key=lambda item: item[1].error)
    known = controller.coordinator.block_types.get(digest)
    name = "a block of another rank" if known is None else known.recording.name
    which = "" if index is None else f" (number {index + 1})"
    bound = controller.coordinator.approvals.bound
    return f"gradient error of {name}{which} measured {worst.error:.3g}; adacc.max_gradient_error = {bound:g}"


def _judge(controller: StepController) -> Mapping[BlockKey, PolicyError]:
    """Judge what all ranks have measured, and write it to the journal. Returns the rejected policies, by block."""
    everyone = controller.ranks.gather(controller.trials.results(controller.blocks))
    rejected = controller.coordinator.approvals.judge(everyone)
    found = {key: error.error for errors in everyone for key, error in errors.items()}
    for key, error in rejected.items():
        found[key] = error.error
    for digest in sorted({digest for digest, _ in found} & controller.coordinator.block_types.keys()):
        errors = {index: error for (of, index), error in found.items() if of == digest and index is not None}
        controller.journal.write(
            "gradient_errors",
            step=controller.schedule.ended,
            block_type=controller.coordinator.block_types[digest].recording.name,
            bound=controller.coordinator.approvals.bound,
            errors=[[index + 1, error] for index, error in sorted(errors.items())],
            rejected=sorted(index + 1 for of, index in rejected if of == digest and index is not None),
        )
    return rejected


def _rebind_all(controller: StepController) -> None:
    for digest in controller.coordinator.block_types:
        controller.rebind(digest)


def _replan(
    controller: StepController,
    digests: Collection[str],
    reason: str,
    capacity: Mapping[str, Mapping[int, int]],
    must_change: bool,
) -> Review:
    coordinator, step = controller.coordinator, controller.schedule.ended
    live_sets = coordinator.partners(digests)
    if not live_sets:
        return _stay(step, reason, "nothing fits the budget")
    names = {name for live_set in live_sets for name in live_set}
    old = coordinator.agreed_policies(names)  # those of all ranks: the schedule depends on them
    try:
        plan = controller.decide(live_sets, f"step {step}: {reason}", True, capacity=capacity)
    except (planner.InfeasibleBudget, planner.NoSolutionInTime) as error:
        return _leave_exact(step, reason, error) if must_change else _stay(step, reason, error)
    changed = sum(_differences(old.get(name), plan.policies.get(name)) for name in names)
    get_logger().info("step %d: %s: re-planned, %d values changed", step, reason, changed)
    return Review(True, changed)


def _stay(step: int, reason: str, why: object) -> Review:
    get_logger().warning("step %d: %s, but the plan in force stays: %s", step, reason, why)
    return Review()


def _leave_exact(step: int, reason: str, why: object) -> Review:
    """The bound comes before the budget: a wrong gradient does harm without a word, a lack of memory says so."""
    text = "step %d: %s. Blocks above the bound now hold everything exactly, which takes more than the budget: %s"
    get_logger().warning(text, step, reason, why)
    return Review()


def _differences(old: Policies | None, new: Policies | None) -> int:
    """The number of values, over all blocks, whose storage differs between the two."""
    if old is None or new is None or len(old) != len(new):
        return sum(len(policy.stores) for policy in new or ())
    stores = (
        (a, b) for before, after in zip(old, new, strict=True) for a, b in zip(before.stores, after.stores, strict=True)
    )
    return sum(a != b for a, b in stores)
