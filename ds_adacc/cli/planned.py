"""What `ds_adacc plan` shows: a JSON document, or tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ds_adacc import planner
from ds_adacc.cli.answer import table
from ds_adacc.cli.planning import Planned
from ds_adacc.planner import human_bytes
from ds_adacc.report.choices import named_choices
from ds_adacc.report.table import block_type_rows

_ROWS = 12  # of a frontier's table, beside the points in use


def document(planned: Planned) -> dict[str, Any]:
    """All of it. Bytes, and seconds."""
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
            "solve_seconds": solution.solve_seconds,
            "proven_optimal": solution.proven_optimal,
        },
        "baselines": [vars(baseline) for baseline in planned.baselines],
        "largest_batch": {"recorded": estimate.batches, "estimates": estimate.largest, "refusal": estimate.refusal},
    }


def _block_type(planned: Planned, place: int) -> dict[str, Any]:
    block_type = planned.problem.block_types[place]
    return {
        "name": block_type.name,
        "blocks": block_type.blocks,
        "calls": block_type.count,
        "operators": len(block_type.profile.graph.ops),
        "values": len(block_type.profile.graph.values),
        "frontier": [_point(block_type.profile, point) for point in planned.frontiers[block_type.name]],
        "policies": [
            {"blocks": count, **_point(block_type.profile, planner.Point.of(block_type.profile, policy))}
            for policy, count in _used(planned, place).items()
        ],
    }


def _point(profile: planner.Profile, point: planner.Point) -> dict[str, Any]:
    return {
        "held": point.simulation.held,
        "added_seconds": point.simulation.seconds,
        "gradient_error": point.gradient_error if _is_measured(profile) else None,
        "choices": named_choices(profile, point.policy),
    }


def view(planned: Planned) -> RenderableType:
    """The block types, their frontiers, the plan, what there is beside it, and the largest micro-batch."""
    return Group(
        _block_types(planned),
        *(_frontier(planned, place) for place in range(len(planned.problem.block_types))),
        *_plan(planned),
        _baselines(planned),
        *_estimate(planned),
    )


def _block_types(planned: Planned) -> RenderableType:
    header = ("blocks like", "blocks", "calls", "operators", "without", "full checkpointing")
    rows = [
        (
            block_type.name,
            str(block_type.blocks),
            str(block_type.count),
            str(len(block_type.profile.graph.ops)),
            *(
                human_bytes(block_type.count * plan(block_type.profile).held_bytes(block_type.profile))
                for plan in (planner.retain_policy, planner.recompute_policy)
            ),
        )
        for block_type in planned.problem.block_types
    ]
    title = f"What micro-batch {planned.recorded.batch} holds between forward and backward"
    return table(title, header, rows, header[1:])


def _frontier(planned: Planned, place: int) -> RenderableType:
    """Some of the points, and all that the plan uses; what a point does that the one above does not."""
    block_type, used = planned.problem.block_types[place], _used(planned, place)
    points = planned.frontiers[block_type.name]
    picked = {point.policy: point for number, point in enumerate(points) if number in _some(len(points))}
    picked |= {policy: planner.Point.of(block_type.profile, policy) for policy in used}
    shown = sorted(picked.values(), key=lambda point: (-point.simulation.held, point.simulation.seconds))
    measured = _is_measured(block_type.profile)
    header = ("held", "added ms", *(("gradient error",) if measured else ()), "blocks", "what changes")
    rows = []
    before: Mapping[str, str] = {}
    for point in shown:
        choices = named_choices(block_type.profile, point.policy)
        rows.append(
            (
                human_bytes(point.simulation.held),
                f"{1000 * point.simulation.seconds:.3f}",
                *((f"{point.gradient_error:.4f}",) if measured else ()),
                str(used[point.policy] or ""),
                _changes(before, choices) if before else _summed(choices),
            )
        )
        before = choices
    which = f"{len(shown)} points, of its frontier's {len(points)} and all that are in use"
    return table(f"What a call of {block_type.name} can hold: {which}", header, rows, header[:-1])


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


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    by_choice: dict[str, list[str]] = {}
    for name in changed:
        by_choice.setdefault(after.get(name, "drop"), []).append(name)
    return ", ".join(f"{choice} {' '.join(names)}" for choice, names in by_choice.items())


def _summed(choices: Mapping[str, str]) -> str:
    return ", ".join(f"{choice} {count} values" for choice, count in Counter(choices.values()).items())


def _plan(planned: Planned) -> list[RenderableType]:
    """What each block type's blocks run, and the sums; or what would fit."""
    budget = f"{human_bytes(planned.budget)}, {planned.budget / planned.without:.2f} of what no checkpointing takes"
    solution = planned.solution
    if solution is None:
        assert planned.refusal is not None
        return [Text(f"budget: {budget}\nNOTHING FITS: {planned.refusal}")]
    parts: list[RenderableType] = []
    for block_type, chosen in zip(planned.problem.block_types, solution.policies, strict=True):
        header, *rows = block_type_rows(block_type, chosen, planned.recorded.known[block_type.name])
        parts.append(table(f"The plan for {block_type.name}", header, rows, {"raw"}))
    optimal = "optimal" if solution.proven_optimal else "not proven optimal"
    lines = (
        f"budget: {budget}",
        f"peak:   {human_bytes(solution.peak)}, of which {human_bytes(sum(solution.held))} are held between forward "
        "and backward",
        f"added:  {1000 * solution.added_seconds:.1f} ms to a forward and backward; "
        f"solved in {solution.solve_seconds:.3f} s, {optimal}",
    )
    return [*parts, *map(Text, lines)]


def _baselines(planned: Planned) -> RenderableType:
    header = ("instead", "peak", "added ms", "fits")
    rows = [
        (
            baseline.name,
            human_bytes(baseline.peak),
            "-" if baseline.added_seconds is None else f"{1000 * baseline.added_seconds:.1f}",
            "yes" if baseline.fits else "no",
        )
        for baseline in planned.baselines
    ]
    return table("Beside it", header, rows, {"peak", "added ms"})


def _estimate(planned: Planned) -> Sequence[RenderableType]:
    estimate = planned.estimate
    small, large = estimate.batches
    if estimate.refusal:
        return [Text(f"no estimate of the largest micro-batch: {estimate.refusal}")]
    rows = [(name, "any" if most is None else str(most)) for name, most in estimate.largest.items()]
    told = f"  estimated: all bytes on the line through those at micro-batches {small} and {large}"
    return [table("Largest micro-batch within the budget", ("with", "estimate"), rows, {"estimate"}), Text(told)]
