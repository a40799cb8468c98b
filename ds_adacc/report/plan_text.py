"""The plan in force, with what was observed, as text for the log and as an event for the journal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from ds_adacc.observe.calibration import Observation
from ds_adacc.plan.agreement import Agreement
from ds_adacc.plan.budget import UNLIMITED, Budget
from ds_adacc.plan.plan import Plan
from ds_adacc.planner import human_bytes
from ds_adacc.program.generators import unmoved
from ds_adacc.program.recording import Recording
from ds_adacc.report.decision import Decision, decision_of, span

_ROUNDED = 1  # byte, by which a fraction of a peak is rounded
_MORE = "`ds_adacc report` shows its table"


def decision_table(plan: Plan, decisions: Sequence[Decision], agreement: Agreement, observation: Observation) -> str:
    """What becomes of each value in which blocks. Then the sums, and what baselines would have cost.

    It fits on a screen: of a large plan only the part that takes most memory.
    """
    # Rich takes time to import, so it is not imported before. It draws a number from Python's `random`.
    with unmoved(()):
        from ds_adacc.report.grid import plain
        from ds_adacc.report.screen import brief_tables
        from ds_adacc.report.tables import baselines_grid

    lines = [f"plan ({plan.reason}):"]
    if decisions:
        lines.append(plain(brief_tables(decisions)))
    unknown = len(plan.block_types) - len(decisions)
    if unknown:  # after a resume, those of other ranks, and of input sizes that have not come again
        lines.append(f"  {unknown} more block types, of which this rank has run no block since the run was resumed")
    lines += _summary(plan, agreement.budget, observation)
    lines += _errors(plan, agreement)
    if plan.baselines:
        lines.append(plain(baselines_grid(plan.baselines)))
    return "\n".join(lines)


def line_of_new_plan(plan: Plan) -> str:
    """That there is a plan, and why."""
    peak, budget = human_bytes(plan.peak), _shown(plan.budget)
    beside = f"above the budget of {budget}" if plan.peak > plan.budget else f"the budget {budget}"
    return f"a plan is made in {plan.solve_seconds:.1f} s ({plan.reason}): its peak is {peak}, {beside}"


def line_of_observation(plan: Plan, observation: Observation, is_new: bool) -> str:
    """What was observed under a plan that gets no table. `is_new`: it differs from the plan that was told last."""
    which = "a new plan is in force" if is_new else "the solver has found the same plan again"
    peaks = f"peak {_peaks(plan, observation)}; budget {_shown(plan.budget)}"
    saved = f"without checkpointing {human_bytes(plan.without)}"
    cost = f"adds {1000 * plan.added_seconds:.1f} ms to a forward and backward"
    return f"{which} ({plan.reason}): {peaks}; {saved}; {cost}. {_MORE}"


def line_of_correction(plan: Plan, observation: Observation) -> str:
    """What was observed under a plan whose memory model was wrong: another follows at once."""
    only = ", of which the forwards took more or less than planned" if observation.peak is None else ""
    return f"peak {_peaks(plan, observation)}{only}. The memory model is corrected, and another plan follows"


def _peaks(plan: Plan, observation: Observation) -> str:
    peak = f"planned {human_bytes(plan.peak)}"
    if observation.peak is None:
        return peak
    seen = human_bytes(round(observation.peak.observed))
    if _had_other_calls(plan, observation):
        return f"{peak}, {seen} as estimated from the observed step, which had other sizes or calls"
    return f"{peak}, observed {seen}"


def _had_other_calls(plan: Plan, observation: Observation) -> bool:
    """Whether the calls of the observed step were not those that the plan is for, by their sizes or their number."""
    return observation.held.planned != plan.held


def journal_fields(plan: Plan, decisions: Iterable[Decision], step: int) -> dict[str, object]:
    """The fields of the journal's event "plan". Bytes and seconds."""
    return {
        "step": step,
        "reason": plan.reason,
        "budget": plan.budget if plan.budget < UNLIMITED else None,
        "without": plan.without,
        "peak": plan.peak,
        "held": plan.held,
        "added_seconds": plan.added_seconds,
        "solve_seconds": plan.solve_seconds,
        "proven_optimal": plan.proven_optimal,
        "block_types": [asdict(decision) for decision in decisions],
        "baselines": [asdict(baseline) for baseline in plan.baselines],
    }


@dataclass(frozen=True)
class MetType:
    """A block type that a rank has met: what is decided for it, and at what input size.

    `varies`: the rank has met the same blocks at other sizes too.
    """

    decision: Decision
    size: str
    varies: bool


def decisions_here(plan: Plan, agreement: Agreement) -> dict[str, MetType]:
    """Those of the plan's block types that this rank has met."""
    found, policies = {}, plan.policies
    names = {digest: _blocks(digest, agreement) for digest in agreement.known_types}
    count = Counter(names.values())
    for block_type in plan.block_types:
        if (digest := block_type.name) in names:
            name, blocks = names[digest], list(agreement.forward_order.names(digest).values())
            recording = agreement.known_types[digest].recording
            decision = decision_of(name, blocks, block_type, policies[digest], recording)
            found[digest] = MetType(decision, _size(recording), varies=count[name] > 1)
    return found


def merge_decisions(plan: Plan, everyone: Iterable[Mapping[str, MetType]]) -> list[Decision]:
    """What several ranks have returned from `decisions_here`, once for each block type that any rank has met.

    Where the same blocks have several types, most often by their sizes, a name ends with the size.
    """
    merged: dict[str, MetType] = {}
    for here in everyone:
        merged = {**here, **merged}
    found = [merged[block_type.name] for block_type in plan.block_types if block_type.name in merged]
    count = Counter(met.decision.name for met in found)
    vary = {met.decision.name for met in found if met.varies or count[met.decision.name] > 1}
    return [
        replace(met.decision, name=f"{met.decision.name} at {met.size}") if met.decision.name in vary else met.decision
        for met in found
    ]


def _blocks(digest: str, agreement: Agreement) -> str:
    """The blocks of a type that this rank has met, such as "blocks.0-5 (Block)"."""
    return span(agreement.forward_order.names(digest).values()) or agreement.known_types[digest].recording.name


def _size(recording: Recording) -> str:
    """The sizes of the largest input, and of others like it, as of both texts that a translator's layer reads."""
    inputs = [tuple(value.geometry.size) for value in recording.values if value.origin == "input"]
    if not inputs:
        return "no input"
    largest = max(inputs, key=math.prod)
    alike = [size for size in inputs if len(size) == len(largest) and size[-1:] == largest[-1:]]
    return " and ".join("x".join(map(str, size)) for size in dict.fromkeys(alike))


def _errors(plan: Plan, agreement: Agreement) -> list[str]:
    """The largest gradient error that was measured of a policy in force, beside the bound."""
    digests = {block_type.name for block_type in plan.block_types}
    errors = {key: error for key, error in agreement.errors_in_force().items() if key[0] in digests}
    if not errors:
        return []
    (digest, index), error = max(errors.items(), key=lambda item: item[1])
    names = agreement.forward_order.names(digest)
    which = f" ({names[index]})" if index in names else ""  # it may be a block of another rank
    return [f"  gradient error of a block: {error:.3g} at most{which}, bound {agreement.approvals.max_error:g}"]


def _shown(budget: int) -> str:
    return human_bytes(budget) if budget < UNLIMITED else "none"


def _of_largest(plan: Plan, budget: Budget) -> list[str]:
    """Where the budget is a fraction: of what it is, if not of the peak without checkpointing that the plan has."""
    if budget.fraction is None:
        return []
    if budget.limit is not None and budget.limit > plan.budget:
        largest = human_bytes(budget.limit)
        return [f"    the budget has grown to {largest}, {budget.fraction:g} of the peak of the largest batch so far"]
    of = plan.budget / budget.fraction
    if plan.without and of - plan.without > _ROUNDED / budget.fraction:
        return [f"    the budget is {budget.fraction:g} of {human_bytes(round(of))}, the largest peak predicted so far"]
    return []


def _where_all_fits(plan: Plan, budget: Budget) -> list[str]:
    """That the plan leaves memory as it is without ds_adacc, and what to set: else users would look for a fault.

    A fraction lets everything fit only for batches that are smaller than the largest.
    """
    if plan.peak != plan.without or plan.peak > plan.budget or budget.fraction is not None:
        return []
    hint = "all of this batch fits the budget, so all is retained; a smaller memory_budget, such as 0.4, takes less"
    return [f"    {hint}"]


def _summary(plan: Plan, budget: Budget, observation: Observation) -> list[str]:
    fraction = plan.peak / plan.without if plan.without else 1.0
    held = f"  held between forward and backward: planned {human_bytes(plan.held)}"
    if _had_other_calls(plan, observation):
        planned, observed = human_bytes(observation.held.planned), human_bytes(observation.held.observed)
        lines = [held, f"    the observed step had other sizes or calls: planned for it {planned}, observed {observed}"]
    else:
        lines = [f"{held}, observed {human_bytes(observation.held.observed)}"]
    if plan.cached:
        casts = f"until forward ends, autocast keeps {human_bytes(plan.cached)} of casts of weights besides"
        lines.append(f"    {casts}; torch.autocast(..., cache_enabled=False) keeps none")
    lines += [
        f"  peak: {_peaks(plan, observation)}; budget {_shown(plan.budget)}",
        f"  peak without checkpointing: {human_bytes(plan.without)}; the plan takes {fraction:.2f} of it",
        *_of_largest(plan, budget),
        *_where_all_fits(plan, budget),
        f"  added to a forward and backward: {1000 * plan.added_seconds:.1f} ms",
        *_device_memory(observation),
    ]
    optimal = "optimal" if plan.proven_optimal else "not proven optimal"
    return [*lines, f"  solved in {plan.solve_seconds:.3f} s, {optimal}"]


def _device_memory(observation: Observation) -> Iterator[str]:
    """What the process has taken of a CUDA device."""
    if (device := observation.device) is not None:
        taken = f"{human_bytes(device.allocated)} allocated, {human_bytes(device.reserved)} reserved"
        yield f"  device memory at most: {taken}"
        if device.advice:
            yield f"    {device.advice}"
