"""What `ds_adacc plan` shows: a JSON document, or tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ds_adacc import planner
from ds_adacc.cli.plan_computation import Planned
from ds_adacc.log import named
from ds_adacc.plan.budget_error import as_key
from ds_adacc.planner import human_bytes
from ds_adacc.report.decision import decision_of, named_choices
from ds_adacc.report.grid import table
from ds_adacc.report.tables import baselines_grid, decision_tables

_ROWS = 12  # of a frontier's table, beside the points in use


def document(planned: Planned) -> dict[str, Any]:
    """All that was found out, in bytes and seconds."""
    solution, estimate = planned.solution, planned.estimate
    return {
        "batch": planned.recorded.batch,
        "device": str(planned.recorded.device),
        "budget": planned.budget,
        "without": planned.without,
        "smallest": planned.refusal.smallest if planned.refusal else None,
        "block_types": [_block_type(planned, place) for place in range(len(planned.problem.block_types))],
        "plan": None
        if solution is None
        else {
            "peak": solution.peak,
            "held": sum(solution.held),
            "added_seconds": solution.added_seconds,
            "solve_seconds": planned.solve_seconds,
            "proven_optimal": solution.proven_optimal,
        },
        "baselines": [vars(baseline) for baseline in planned.baselines],
        "largest_batch": {"recorded": estimate.batches, "estimates": estimate.largest, "refusal": estimate.refusal},
    }


def _block_type(planned: Planned, place: int) -> dict[str, Any]:
    block_type, labels = planned.problem.block_types[place], labels_of(planned, place)
    return {
        "name": block_type.name,
        "blocks": block_type.blocks,
        "calls": block_type.count,
        "operators": len(block_type.profile.graph.ops),
        "values": len(block_type.profile.graph.values),
        "frontier": [_point(block_type.profile, point, labels) for point in planned.frontiers[block_type.name]],
        "policies": [
            {"blocks": count, **_point(block_type.profile, planner.Point.of(block_type.profile, policy), labels)}
            for policy, count in _used(planned, place).items()
        ],
    }


def labels_of(planned: Planned, place: int) -> list[str]:
    """The users' names of the block type's values."""
    name = planned.problem.block_types[place].name
    return [value.label for value in planned.recorded.known[name].recording.values]


def _point(profile: planner.Profile, point: planner.Point, labels: Sequence[str]) -> dict[str, Any]:
    return {
        "held": point.simulation.held,
        "added_seconds": point.simulation.seconds,
        "gradient_error": point.gradient_error if _is_measured(profile) else None,
        "choices": named_choices(profile, point.policy, labels),
    }


def view(planned: Planned) -> RenderableType:
    """The block types, their frontiers, the plan, other strategies, and the largest micro-batch.

    That no plan fits stands in the place of the plan, and again at the end.
    """
    return Group(
        _block_types(planned),
        *(_frontier(planned, place) for place in range(len(planned.problem.block_types))),
        *_plan(planned),
        Text("\nOther strategies"),
        baselines_grid(planned.baselines),
        *_estimate(planned),
        *_refusal(planned),
    )


def _block_types(planned: Planned) -> RenderableType:
    header = ("blocks like", "blocks", "calls", "operators", "none", "full")
    rows = [
        (
            block_type.name,
            str(block_type.blocks),
            str(block_type.count),
            str(len(block_type.profile.graph.ops)),
            *(
                human_bytes(block_type.count * plan(block_type.profile).held_bytes(block_type.profile))
                for plan in (planner.no_checkpointing, planner.recompute_policy)
            ),
        )
        for block_type in planned.problem.block_types
    ]
    title = (
        f"What micro-batch {planned.recorded.batch} holds between forward and backward,\n"
        "without checkpointing (none) and with every block checkpointed (full)"
    )
    return table(title, header, rows, header[1:])


def _frontier(planned: Planned, place: int) -> RenderableType:
    """Some of the points, and all that the plan uses. A row says what differs from the row above.

    It does not say so of statistics, which are small and many.
    """
    block_type, used = planned.problem.block_types[place], _used(planned, place)
    points = planned.frontiers[block_type.name]
    picked = {point.policy: point for number, point in enumerate(points) if number in _some(len(points))}
    picked |= {policy: planner.Point.of(block_type.profile, policy) for policy in used}
    shown = sorted(picked.values(), key=lambda point: (-point.simulation.held, point.simulation.seconds))
    measured, labels = _is_measured(block_type.profile), labels_of(planned, place)
    values = dict(zip(labels, block_type.profile.graph.values, strict=True))
    nbytes = {label: value.nbytes for label, value in values.items()}
    header = ("held", "added ms", *(("error",) if measured else ()), "blocks", "what changes")
    rows = []
    before: Mapping[str, str] = {}
    for point in shown:
        named = named_choices(block_type.profile, point.policy, labels)
        choices = {label: choice for label, choice in named.items() if values[label].role != "statistic"}
        rows.append(
            (
                human_bytes(point.simulation.held),
                f"{1000 * point.simulation.seconds:.3f}",
                *((f"{point.gradient_error:.4f}",) if measured else ()),
                str(used[point.policy] or ""),
                _changes(before, choices, nbytes) if before else _counted(choices),
            )
        )
        before = choices
    title = (
        f"What a call of {block_type.name} can hold, and the time that this adds\n"
        f"({len(shown)} points: some of the frontier's {len(points)}, and those that the plan uses)"
    )
    if measured:
        title += (
            "\nerror: of the block's gradient, as estimated from each value's own measured error.\n"
            "In training, every lossy policy is measured on its block before it is used."
        )
    return table(title, header, rows, header[:-1])


def _is_measured(profile: planner.Profile) -> bool:
    """Whether the gradient errors of the codecs are known."""
    return any(offer.gradient_error for offers in profile.codecs for offer in offers)


def _used(planned: Planned, place: int) -> Counter[planner.Policy]:
    """How many blocks of the block type run each policy."""
    return Counter(planned.solution.policies[place] if planned.solution else ())


def _some(count: int) -> set[int]:
    """Numbers of at most so many points, the first and the last among them."""
    most = min(count, _ROWS)
    return {round(number * (count - 1) / max(most - 1, 1)) for number in range(most)}


def _changes(before: Mapping[str, str], after: Mapping[str, str], nbytes: Mapping[str, int]) -> str:
    """The values by their new choice, the largest first; where many have the same one, the others are counted."""
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    by_choice: dict[str, list[str]] = {}
    for name in sorted(changed, key=lambda name: -nbytes[name]):
        by_choice.setdefault(after.get(name, "drop"), []).append(name)
    return "; ".join(f"{choice} {named(names)}" for choice, names in by_choice.items()) or "statistics only"


def _counted(choices: Mapping[str, str]) -> str:
    (first, count), *others = Counter(choices.values()).items()
    return "; ".join([f"{first} {count} value{'s' if count > 1 else ''}", *(f"{each} {n}" for each, n in others)])


def _plan(planned: Planned) -> list[RenderableType]:
    """What the blocks of each type run, and the sums; or the smallest budget that would do."""
    budget = f"{human_bytes(planned.budget)}, {planned.budget / planned.without:.2f} of the peak without checkpointing"
    solution = planned.solution
    if solution is None:
        assert planned.refusal is not None
        text = f"NO PLAN FITS: {planned.refusal}\nSet {as_key(planned.refusal.smallest, planned.without)}"
        return [Text(f"budget: {budget}\n{text}")]
    parts: list[RenderableType] = []
    for block_type, chosen in zip(planned.problem.block_types, solution.policies, strict=True):
        name, recorded = block_type.name, planned.recorded
        decision = decision_of(name, recorded.blocks[name], block_type, chosen, recorded.known[name].recording)
        parts += [Text(f"The plan for {block_type.name}"), decision_tables(decision), Text()]
    optimal = "optimal" if solution.proven_optimal else "not proven optimal"
    lines = (
        f"budget: {budget}",
        f"peak:   {human_bytes(solution.peak)}, of which {human_bytes(sum(solution.held))} is held between passes",
        f"added:  {1000 * solution.added_seconds:.1f} ms to a forward and backward; "
        f"solved in {planned.solve_seconds:.3f} s, {optimal}",
    )
    if solution.fallback:
        lines = (*lines, f"the solver found no plan, so this one is of simple rules: {solution.fallback}")
    return [*parts, *map(Text, lines)]


def _refusal(planned: Planned) -> list[RenderableType]:
    """What comes after all tables if no plan fits: the budget that would do."""
    if planned.refusal is None:
        return []
    return [
        Text(f"NO PLAN FITS {human_bytes(planned.budget)}: set {as_key(planned.refusal.smallest, planned.without)}")
    ]


def _estimate(planned: Planned) -> Sequence[RenderableType]:
    estimate = planned.estimate
    small, large = estimate.batches
    if estimate.refusal:
        return [Text(f"\nno estimate of the largest micro-batch:\n  {estimate.refusal}")]
    rows = [
        (name, "any" if most is None else str(most) if most else "not even 1")
        for name, most in estimate.largest.items()
    ]
    title = (
        "Largest micro-batch within the budget\n"
        f"(estimated: bytes grow on the line through micro-batches {small} and {large})"
    )
    return [Text(), table(title, ("with", "estimate"), rows, {"estimate"})]
