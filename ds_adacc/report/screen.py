"""The part of a plan's tables that fits on a screen. The journal holds all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from ds_adacc.planner import human_bytes
from ds_adacc.report.decision import DecidedValue, Decision, UsedPolicy, span
from ds_adacc.report.grid import INDENT, WIDTH, grid
from ds_adacc.report.tables import columns_that_fit, decision_tables, folded, shortened_path

_LINES = 32  # of the tables of all block types together; the sums and the other strategies take some fifteen more
_DETAILED = 2  # block types whose values are shown
_ROWS = 6  # the most block types in the list of the others
_HEADERS = 5  # lines of a block type's tables that are no values and policies
_NAME = 44
_EVERYTHING = "ds_adacc report --full shows everything"


def brief_tables(decisions: Sequence[Decision]) -> RenderableType:
    """Tables of the block types that hold most, and a line for each of the others."""
    groups = alike(decisions)
    groups.sort(key=lambda each: each.calls * max((p.held_bytes for p in each.policies), default=0), reverse=True)
    detailed, others = groups[:_DETAILED], groups[_DETAILED:]
    parts: list[RenderableType] = []
    is_whole = len(detailed) == len(decisions)
    for decision in detailed:
        short, left_out = _fitted(decision, _LINES // len(detailed))
        is_whole = is_whole and short == replace(decision, values=tuple(folded(decision.values)))
        room = WIDTH - 2 - len(heading(replace(decision, name="")))
        title = heading(replace(decision, name=shortened_path(decision.name, room)))
        parts += [Text(f"  {title}"), decision_tables(short, left_out)]
    if others:
        parts += [Text(), _listed(others)]
    parts += remarks_on(decisions)
    if not is_whole:
        parts.append(Text(f"  {_EVERYTHING}"))
    return Group(*parts)


def remarks_on(decisions: Sequence[Decision]) -> list[RenderableType]:
    """The remarks, each once, with the names of the blocks that it is about if these are not all."""
    about: dict[str, list[str]] = {}
    for decision in decisions:
        for remark in decision.remarks:
            about.setdefault(remark, []).append(decision.name)
    texts = (r if len(names) == len(decisions) else f"{span(names)}: {r}" for r, names in about.items())
    return [Padding(Text(text), (0, 0, 0, INDENT), expand=False) for text in texts]


def heading(decision: Decision) -> str:
    calls = "1 call" if decision.calls == 1 else f"{decision.calls} calls"
    operators = "1 operator" if decision.operators == 1 else f"{decision.operators} operators"
    return f"{decision.name}: {calls} held at once, {operators} each"


def alike(decisions: Iterable[Decision]) -> list[Decision]:
    """The decisions, those with the same choices for the same values as one, with the largest costs among them."""
    groups: dict[tuple[object, ...], list[Decision]] = {}
    for decision in decisions:
        groups.setdefault((decision.operators, decision.values), []).append(decision)
    return [_joined(group) if len(group) > 1 else group[0] for group in groups.values()]


def _joined(group: Sequence[Decision]) -> Decision:
    count = len(group[0].policies)
    policies = [
        UsedPolicy(
            "all blocks" if count == 1 else f"policy {place + 1}",
            max(each.policies[place].held_bytes for each in group),
            max(each.policies[place].added_seconds for each in group),
        )
        for place in range(count)
    ]
    calls = sum(each.calls for each in group)
    return replace(group[0], name=span(each.name for each in group), calls=calls, policies=tuple(policies))


def _fitted(decision: Decision, lines: int) -> tuple[Decision, UsedPolicy | None]:
    """The decision with so many values and policies that it takes so many lines, and a sum of the other policies."""
    counts = range(max(1, min(len(decision.policies), lines // 4)), 0, -1)
    cut = (_cut(decision, count, lines) for count in counts)
    return next(found for found in cut if columns_that_fit(found[0]) >= len(found[0].policies))


def _cut(decision: Decision, count: int, lines: int) -> tuple[Decision, UsedPolicy | None]:
    policies, others = decision.policies[:count], decision.policies[count:]
    values = [replace(value, choices=value.choices[:count]) for value in folded(decision.values)]
    room = lines - _HEADERS - len(policies) - bool(others)
    if len(values) > room:
        kept = sorted(values, key=lambda value: value.nbytes, reverse=True)[: room - 1]
        values = [*(v for v in values if v in kept), _summed([v for v in values if v not in kept])]
    return replace(decision, values=tuple(values), policies=policies), _rest(others)


def _summed(values: Sequence[DecidedValue]) -> DecidedValue:
    choices = tuple(
        each[0] if len(set(each)) == 1 else "various" for each in zip(*(v.choices for v in values), strict=True)
    )
    return DecidedValue(f"{len(values)} smaller values", "", "", (), "", sum(v.nbytes for v in values), choices)


def _rest(policies: Sequence[UsedPolicy]) -> UsedPolicy | None:
    if not policies:
        return None
    held, added = max(p.held_bytes for p in policies), max(p.added_seconds for p in policies)
    others = "1 other policy" if len(policies) == 1 else f"{len(policies)} other policies, at most"
    return UsedPolicy(others, held, added)


def _listed(decisions: Sequence[Decision]) -> RenderableType:
    """A line for each of these block types, the last for those that are left."""
    listed = decisions if len(decisions) <= _ROWS else decisions[: _ROWS - 1]
    rows = [_row(shortened_path(each.name, _NAME), [each]) for each in listed]
    if len(listed) < len(decisions):
        rest = decisions[len(listed) :]
        rows.append(_row(f"{len(rest)} more", rest))
    header = ("other blocks", "calls", "policies", "held by a call")
    return grid(header, rows, header[1:])


def _row(name: str, decisions: Sequence[Decision]) -> tuple[str, ...]:
    held = [policy.held_bytes for each in decisions for policy in each.policies]
    least, most = human_bytes(min(held)), human_bytes(max(held))
    calls, policies = sum(each.calls for each in decisions), sum(len(each.policies) for each in decisions)
    return name, str(calls), str(policies), most if least == most else f"{least} - {most}"
