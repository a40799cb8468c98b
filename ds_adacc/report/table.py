"""Say what happened: one table of the plan in force, with what was observed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby

from ds_adacc import planner
from ds_adacc.plan.block_type import KnownType
from ds_adacc.plan.coordinator import Coordinator
from ds_adacc.plan.plan import Baseline, Plan, Policies
from ds_adacc.planner import human_bytes
from ds_adacc.rectify.calibration import Pair, Seen

Row = tuple[str, ...]
HEADER = ("value", "role", "shape", "dtype", "raw")


def decision_table(plan: Plan, coordinator: Coordinator, seen: Seen | None) -> str:
    """Per block type, its saved values and what becomes of each in which blocks; the sums; baselines."""
    lines = [f"plan ({plan.reason}):"]
    for block_type in plan.block_types:
        chosen = plan.policies[block_type.name]
        if block_type.name not in coordinator.block_types:
            lines.append(f"  {block_type.count} calls of a block that another rank runs")
            continue
        known = coordinator.block_types[block_type.name]
        operators = len(known.recording.ops)
        lines.append(f"  {known.recording.name}: {block_type.count} calls held at once, {operators} operators each")
        lines += aligned(block_type_rows(block_type, chosen, known))
    return "\n".join([*lines, *_summary(plan, seen), *_baselines(plan.baselines)])


def block_type_rows(block_type: planner.BlockType, chosen: Policies, known: KnownType) -> list[Row]:
    """The table of one block type: a column for each policy, headed by the blocks that run it, counted from 1."""
    columns = policy_columns(chosen)
    rows = [(*HEADER, *columns)]
    for index in sorted({index for policy in columns.values() for index in _told(block_type, policy)}):
        value = known.recording.values[index]
        shape = "x".join(map(str, value.geometry.size)) or "scalar"
        dtype = str(value.geometry.dtype).removeprefix("torch.")
        choices = [policy.stores[index] or "recompute" for policy in columns.values()]
        rows.append((value.name, value.role, shape, dtype, human_bytes(value.nbytes), *choices))
    held = [human_bytes(policy.held_bytes(block_type.profile)) for policy in columns.values()]
    seconds = [planner.simulate(block_type.profile, policy).seconds for policy in columns.values()]
    rows.append(("held by a call", "", "", "", "", *held))
    rows.append(("added to a call", "", "", "", "", *(f"{1000 * each:.3f} ms" for each in seconds)))
    return rows


def policy_columns(chosen: Policies) -> dict[str, planner.Policy]:
    """The policies by the blocks that run them: {"blocks 1-4": ..., "block 5": ...}."""
    columns, first = {}, 1
    for policy, run in groupby(chosen):
        last = first + len(list(run)) - 1
        columns["all blocks" if last - first + 1 == len(chosen) else _named(first, last)] = policy
        first = last + 1
    return columns


def aligned(rows: Sequence[Row]) -> list[str]:
    """The rows as lines, each column as wide as it needs."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    holders = ([holder.ljust(width) for holder, width in zip(row, widths, strict=True)] for row in rows)
    return ["    " + "  ".join(row).rstrip() for row in holders]


def _named(first: int, last: int) -> str:
    return f"block {first}" if first == last else f"blocks {first}-{last}"


def _told(block_type: planner.BlockType, policy: planner.Policy) -> set[int]:
    """Values with bytes of their own that are saved, stored, or rebuilt on the way to a saved one."""
    graph = block_type.profile.graph
    rebuilt = {index for op in policy.replays for index in graph.ops[op].outputs}
    stored = {index for index, choice in enumerate(policy.stores) if choice is not None}
    return {index for index in {*graph.saved, *stored, *rebuilt} if graph.values[index].nbytes}


def _summary(plan: Plan, seen: Seen | None) -> list[str]:
    held = "not seen"
    if seen is not None:
        held = human_bytes(seen.held.observed)
        if seen.held.planned != plan.held:
            held += f" where {human_bytes(seen.held.planned)} was planned for the calls of that step"
    budget = human_bytes(plan.budget) if plan.budget < 1 << 60 else "none"
    fraction = plan.peak / plan.without if plan.without else 1.0
    optimal = "optimal" if plan.proven_optimal else "not proven optimal"
    peak = "" if seen is None or seen.peak is None else f", observed {human_bytes(round(seen.peak.observed))}"
    took = "" if seen is None or seen.seconds is None else f"; {_seconds(seen.seconds)}"
    return [
        f"  held between forward and backward: planned {human_bytes(plan.held)}, observed {held}",
        f"  peak: planned {human_bytes(plan.peak)} ({fraction:.2f} of {human_bytes(plan.without)} without "
        f"checkpointing){peak}; budget {budget}",
        f"  added per forward and backward {1000 * plan.added_seconds:.1f} ms; "
        f"solved in {plan.solve_seconds:.3f} s, {optimal}{took}",
    ]


def _seconds(pair: Pair) -> str:
    return f"blocks: planned {1000 * pair.planned:.0f} ms, observed {1000 * pair.observed:.0f} ms"


def _baselines(baselines: Sequence[Baseline]) -> list[str]:
    """What other planners would have cost."""
    if not baselines:
        return []
    rows = [("instead", "peak", "added", "")]
    for baseline in baselines:
        fits = "" if baseline.fits else "does not fit"
        added = "-" if baseline.added_seconds is None else f"{1000 * baseline.added_seconds:.1f} ms"
        rows.append((baseline.name, human_bytes(baseline.peak), added, fits))
    return aligned(rows)


def told(plan: Plan, coordinator: Coordinator, step: int) -> dict[str, object]:
    """The decision as an event of the journal."""
    rows: list[Row] = []
    for block_type in plan.block_types:
        if block_type.name in coordinator.block_types:
            rows += block_type_rows(
                block_type, plan.policies[block_type.name], coordinator.block_types[block_type.name]
            )
    return {
        "step": step,
        "reason": plan.reason,
        "budget": plan.budget if plan.budget < 1 << 60 else None,
        "without": plan.without,
        "peak": plan.peak,
        "held": plan.held,
        "added_seconds": plan.added_seconds,
        "solve_seconds": plan.solve_seconds,
        "proven_optimal": plan.proven_optimal,
        "table": _padded(rows),
        "baselines": [asdict(baseline) for baseline in plan.baselines],
    }


def _padded(rows: Sequence[Row]) -> list[Row]:
    """Rows of one length."""
    width = max((len(row) for row in rows), default=0)
    return [row + ("",) * (width - len(row)) for row in rows]
