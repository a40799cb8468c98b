"""What follows from an observed step, a step of trials or a tracking step, when it has ended.

The memory model is corrected, policies come into force, or a new plan is made.

All ranks call these functions at the end of the same steps, and decide alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace

from ds_adacc import planner
from ds_adacc.observe.calibration import Pair
from ds_adacc.observe.device_memory import DeviceMemory
from ds_adacc.observe.rectifier import Review, judge
from ds_adacc.plan.approvals import BlockKey, PolicyErrors, worst
from ds_adacc.plan.live_sets import TypePolicies
from ds_adacc.plan.peak_estimate import estimated_held
from ds_adacc.plan.solve import Forgiven
from ds_adacc.profile.gradient_error import PolicyError
from ds_adacc.steps.planning import Planning
from ds_adacc.steps.step import Step
from ds_adacc.steps.step_schedule import Purpose


def conclude_observation(planning: Planning, step: Step) -> None:
    """After the first step under a plan, compare the plan with it, and tell of the result.

    The next plan counts the corrections of the memory model. If they call for one, the plan's live sets wait for it.
    """
    plan = planning.plan
    if plan is None:
        return
    is_deferred = planning.schedule.observe_in == 1
    planning.schedule = planning.schedule.after_observation()  # on every rank, so that all have the same schedule
    if is_deferred or step.purpose is Purpose.TRY:
        return
    planning.has_run_a_plan = True  # on every rank too, also on one that has called no block
    may_repeat = step.purpose is Purpose.MEASURE and planning.schedule.may_measure_again  # the same on every rank
    if may_repeat and planning.ranks.any(step.was_cut_short):  # some rank has recorded a block
        planning.schedule = planning.schedule.with_measurement_again()
        return
    observer = step.observer
    if planning.observation is not None or observer is None or observer.held_bytes is None:  # no backward was seen
        return
    held = Pair(estimated_held(planning.agreement, observer.held_calls), observer.held_bytes)
    types, origins = planning.agreement.known_types, planning.agreement.origins
    findings = planning.calibration.compare(plan, held, observer.measured, types, origins)
    observation = planning.observation = replace(findings.observation, device=DeviceMemory.of(planning.device))
    planning.pending.correct(findings.corrections)
    planning.pending.add(findings.live_sets, findings.reason)
    planning.plan_log.observed(plan, observation, planning.schedule.ended, is_corrected=bool(findings.live_sets))


def conclude_trials(planning: Planning, step: Step) -> None:
    """After a step of trials, plan again for the blocks whose policies exceed the bound on the gradient error.

    Raises planner.InfeasibleBudget if no plan was in force before and none fits both the budget and the bound.
    """
    measured, names = _measured(planning, step)
    rejected = planning.agreement.approvals.judge(measured)
    if rejected:
        reason = why_rejected(rejected, names, planning.agreement.approvals.bound)
        _replan(planning, step, {digest for digest, _ in rejected}, reason, {}, rejected)
    _repeat_trials(planning)


def rectify(planning: Planning, step: Step) -> Review:
    """After a tracking step, plan again if outliers have drifted, or if a gradient error is above the bound."""
    agreement = planning.agreement
    measured, names = _measured(planning, step)
    errors_rise = agreement.approvals.are_rising(measured)
    rejected = agreement.approvals.judge(measured)
    verdict = judge(planning.blocks, agreement, planning.ranks)
    review = Review()
    if verdict.drifted or rejected:
        reason = why_rejected(rejected, names, agreement.approvals.bound) if rejected else verdict.reason
        digests = {*verdict.drifted, *(digest for digest, _ in rejected)}
        review = _replan(planning, step, digests, reason, verdict.capacity, rejected)
        planning.journal.write("rectifier", step=planning.schedule.ended, reason=reason, **asdict(review))
    changed, longest = bool(review.changed or rejected), agreement.config.rectifier.max_interval
    planning.schedule = planning.schedule.after_tracking(changed, errors_rise, longest)
    _repeat_trials(planning)
    return review


def _repeat_trials(planning: Planning) -> None:
    """Repeat the trials later, if on any rank a policy still awaits its own."""
    unfinished = planning.trials.unfinished(planning.blocks)
    if not planning.ranks.any(bool(unfinished)):
        return
    schedule = planning.schedule = planning.schedule.with_trials_again()
    tried = [block for block, trial in unfinished if trial.has_begun]
    if tried and schedule.repeats > 1:
        text = (
            "step %d: the gradient errors of %d blocks could not be measured (the first: %s), since their gradients "
            "were not finite, were zero or did not come, or hooks on their parameters or inputs wait for them. They "
            "recompute all that they can. They are measured again in step %d"
        )
        blocks = list(dict.fromkeys(tried))  # one may be tried at several sizes
        planning.agreement.log.warning(text, schedule.ended, len(blocks), blocks[0].name, schedule.try_from)


def why_rejected(rejected: Mapping[BlockKey, PolicyError], names: Mapping[BlockKey, str], max_error: float) -> str:
    """How many blocks are above the bound, and the one with the largest error, for the log."""
    key, found = max(rejected.items(), key=lambda item: item[1].error)
    shown = (f"{found.error:.{digits}g}" for digits in (3, 6, 17))
    error = next(text for text in shown if not float(text) <= max_error)  # it may be above the bound by little; or NaN
    if len(rejected) == 1:
        return f"the gradient error of {names[key]} is {error}, above adacc.max_gradient_error = {max_error:g}"
    return (
        f"the gradient errors of {len(rejected)} blocks are above adacc.max_gradient_error = {max_error:g} "
        f"(the largest: {error}, of {names[key]})"
    )


def _measured(planning: Planning, step: Step) -> tuple[PolicyErrors, Mapping[BlockKey, str]]:
    """What the ranks have measured, which is also written to the journal; and the names of the blocks, on any rank."""
    results = itertools.chain.from_iterable(planning.ranks.gather(planning.trials.results(step)))
    # On ranks whose blocks have other indices, a key may name several: the one with the largest error counts.
    everyone = sorted(results, key=lambda each: each[2].error)
    names = {key: name for key, name, _ in everyone}
    measured = worst((key, found) for key, _, found in everyone)
    largest = {key: found.error for key, found in measured}
    for digest in sorted({digest for digest, _ in largest}):
        planning.journal.write(
            "gradient_errors",
            step=planning.schedule.ended,
            bound=planning.agreement.approvals.max_error,
            errors=[[names[key], largest[key]] for key in sorted(largest) if key[0] == digest],
        )
    return measured, names


def _replan(
    planning: Planning,
    step: Step,
    digests: Collection[str],
    reason: str,
    capacity: Mapping[str, Mapping[int, int]],
    rejected: Collection[BlockKey],
) -> Review:
    """Plan again for these block types. If no plan is found, the old one stays, unless policies of it are `rejected`.

    The bound comes before the budget: a wrong gradient does harm without a word, a lack of memory says so. So blocks
    with rejected policies get the plan that takes the least, if the solver finds none that keeps the bound and fits the
    budget. A budget that no plan of the run has fitted yet is an error.
    """
    agreement = planning.agreement
    forgiven = Forgiven.NONE
    if rejected:
        forgiven = Forgiven.ALL if planning.has_run_a_plan else Forgiven.OUT_OF_TIME
    live_sets = agreement.partners(sorted(digests), include_unfit=bool(rejected))
    if not live_sets:
        return _stay(planning, reason, "nothing fits adacc.memory_budget with these blocks")
    names = {name for live_set in live_sets for name in live_set}
    old = agreement.agreed_policies(names)  # those of all ranks: the schedule depends on them
    try:
        plan = planning.decide(step, live_sets, reason, forgiven, capacity=capacity)
    except (planner.InfeasibleBudget, planner.NoSolutionInTime) as error:
        if rejected:
            raise
        # Blocks that have got another index await a trial there.
        planning.chooser.choose_policies(agreement.known_types, step)
        return _stay(planning, reason, error)
    changed = sum(_differences(old.get(name), plan.policies.get(name)) for name in names)
    outcome = f"{changed} values in another way than" if changed else "every value as"
    agreement.log.info("step %d: the new plan stores %s the old one", planning.schedule.ended, outcome)
    return Review(True, changed)


def _stay(planning: Planning, reason: str, why: object) -> Review:
    """Log the text of the exception `why`: a handler that keeps log records would keep the exception's frames alive."""
    text = "step %d: %s. A new plan was due, but none was found, so the old one stays in force: %s"
    planning.agreement.log.warning(text, planning.schedule.ended, reason, str(why).rstrip("."))
    return Review()


def _differences(old: TypePolicies | None, new: TypePolicies | None) -> int:
    """The number of values, over all blocks, whose storage differs between the two."""
    if old is None or new is None or len(old) != len(new):
        return sum(len(policy.stores) for policy in new or ())
    stores = (
        (a, b) for before, after in zip(old, new, strict=True) for a, b in zip(before.stores, after.stores, strict=True)
    )
    return sum(a != b for a, b in stores)
