"""Say what happened: one table of the plan in force, with what was observed."""

from __future__ import annotations

from ds_adacc import planner
from ds_adacc.decision import Decision
from ds_adacc.observe import Held
from ds_adacc.planner import human_bytes
from ds_adacc.portfolio import Portfolio


def decision_table(decision: Decision, portfolio: Portfolio, held: Held | None) -> str:
    """Blocks found; per saved value its role, shape, choice, bytes and milliseconds; planned and observed bytes."""
    lines = [f"plan ({decision.reason}):"]
    policies = decision.policies
    for kind in decision.kinds:
        lines += _kind_table(kind, policies[kind.name], portfolio)
    return "\n".join([*lines, *_summary(decision, held)])


def _kind_table(kind: planner.Kind, policy: planner.Policy, portfolio: Portfolio) -> list[str]:
    if kind.name not in portfolio.kinds:
        return [f"  {kind.count} calls of a block that another rank runs"]
    recording = portfolio.kinds[kind.name].recording
    rows = [("value", "role", "shape", "dtype", "choice", "raw", "held", "ms")]
    for index in sorted(_told(kind, policy)):
        value = recording.values[index]
        shape = "x".join(map(str, value.geometry.size)) or "scalar"
        dtype = str(value.geometry.dtype).removeprefix("torch.")
        choice = policy.stores[index] or "recompute"
        raw, held = human_bytes(value.nbytes), human_bytes(policy.stored_bytes(kind.profile, index))
        milliseconds = f"{1000 * _seconds(kind.profile, policy, index):.3f}"
        rows.append((value.name, value.role, shape, dtype, choice, raw, held, milliseconds))
    head = f"  {recording.name}: {kind.count} calls held at once, {len(recording.ops)} operators, each"
    return [head, *_aligned(rows)]


def _told(kind: planner.Kind, policy: planner.Policy) -> set[int]:
    """Values with bytes of their own that are saved, stored, or rebuilt on the way to a saved one."""
    graph = kind.profile.graph
    rebuilt = {index for op in policy.replays for index in graph.ops[op].outputs}
    stored = {index for index, choice in enumerate(policy.stores) if choice is not None}
    return {index for index in {*graph.saved, *stored, *rebuilt} if graph.values[index].nbytes}


def _seconds(profile: planner.Profile, policy: planner.Policy, index: int) -> float:
    """Seconds that the choice adds to a step; a replayed operator counts with its first output."""
    choice = policy.stores[index]
    if choice == planner.RETAIN:
        return 0.0
    if choice is not None:
        return profile.codec(index, choice).seconds
    producer = profile.graph.values[index].producer
    if producer is None or profile.graph.ops[producer].outputs[0] != index:
        return 0.0
    return profile.op_seconds[producer] if producer in policy.replays else 0.0


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    numeric = len(widths) - 3
    return [
        "    "
        + "  ".join(
            cell.rjust(width) if column >= numeric else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _summary(decision: Decision, held: Held | None) -> list[str]:
    seen = human_bytes(held.observed) if held is not None else "not seen"
    if held is not None and held.planned != decision.held:
        seen += f" where {human_bytes(held.planned)} was planned for the calls of that step"
    budget = human_bytes(decision.budget) if decision.budget < 1 << 60 else "none"
    fraction = decision.peak / decision.without if decision.without else 1.0
    optimal = "optimal" if decision.proven_optimal else "not proven optimal"
    return [
        f"  held between forward and backward: planned {human_bytes(decision.held)}, observed {seen}",
        f"  planned peak {human_bytes(decision.peak)} ({fraction:.2f} of {human_bytes(decision.without)} without "
        f"checkpointing), budget {budget}",
        f"  added per forward and backward {1000 * decision.added_seconds:.1f} ms; "
        f"solved in {decision.solve_seconds:.3f} s, {optimal}",
    ]
