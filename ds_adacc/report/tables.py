"""The tables of a plan, of at most 80 columns, for the log and for the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.text import Text

from ds_adacc.planner import Baseline, human_bytes
from ds_adacc.report.decision import DecidedValue, Decision, UsedPolicy
from ds_adacc.report.grid import GAP, INDENT, WIDTH, grid

# The most characters of a label, of a choice (the longest is "offload asymmetric8"), and of a list of blocks.
_LABEL, _CHOICE, _BLOCKS = 28, 19, 40
_SMALL = 0.01  # statistics that take less of the block's bytes are shown as one row


def decision_tables(decision: Decision, left_out: UsedPolicy | None = None) -> RenderableType:
    """What becomes of each value under each policy, and then what each policy costs. `left_out`: one without choices.

    The columns for role and tensor are left out where there is no room for them; policies that do not fit beside
    the labels are in tables of their own.
    """
    rows = folded(decision.values)
    labels, raw, chosen = _columns(decision, rows)
    optional = [["role", *(value.role for value in rows)], ["tensor", *map(_tensor, rows)]]
    columns = [labels, raw]
    for column in optional:
        if _width([*columns, column, *chosen]) <= WIDTH:
            columns.insert(len(columns) - 1, column)
    parts: list[RenderableType] = []
    while chosen:
        count = max((n for n in range(1, len(chosen) + 1) if _width([*columns, *chosen[:n]]) <= WIDTH), default=1)
        header, *body = zip(*columns, *chosen[:count], strict=True)
        parts += [grid(header, body, ("raw",)), Text()]
        chosen = chosen[count:]
    return Group(*parts, _policies([*decision.policies, *([left_out] if left_out else [])]))


def columns_that_fit(decision: Decision) -> int:
    """How many of the policies fit side by side; at least one."""
    labels, raw, chosen = _columns(decision, decision.values)
    return max((n for n in range(1, len(chosen) + 1) if _width([labels, raw, *chosen[:n]]) <= WIDTH), default=1)


def _columns(decision: Decision, rows: Sequence[DecidedValue]) -> tuple[list[str], list[str], list[list[str]]]:
    """The columns of labels, of bytes, and of each policy's choices."""
    labels = ["value", *(shortened(value.label, _LABEL) for value in rows)]
    raw = ["raw", *(human_bytes(value.nbytes) for value in rows)]
    chosen = [
        [shortened(policy.blocks, _CHOICE), *(shortened(value.choices[place], _CHOICE) for value in rows)]
        for place, policy in enumerate(decision.policies)
    ]
    return labels, raw, chosen


def baselines_grid(baselines: Sequence[Baseline]) -> RenderableType:
    """What other strategies would cost."""
    rows = [
        (
            each.name,
            human_bytes(each.peak),
            "-" if each.added_seconds is None else f"{1000 * each.added_seconds:.1f}",
            "yes" if each.fits else "no",
        )
        for each in baselines
    ]
    return grid(("instead", "peak", "added ms", "fits"), rows, ("peak", "added ms"))


def shortened(text: str, most: int) -> str:
    """The text, its middle left out if it is longer than so many characters."""
    if len(text) <= most:
        return text
    end = (most - 1) // 2
    return f"{text[: most - 1 - end]}\N{HORIZONTAL ELLIPSIS}{text[-end:]}"


def shortened_path(name: str, most: int) -> str:
    """The name of blocks without the modules around them, as far as it must be no longer than so many characters."""
    rest = name
    while len(rest) >= most and re.match(r"[^\d.]+\.[^\d.\[]", rest):
        rest = rest.partition(".")[2]
    return name if len(name) <= most else shortened(f"\N{HORIZONTAL ELLIPSIS}{rest}" if rest != name else name, most)


def folded(values: Sequence[DecidedValue]) -> list[DecidedValue]:
    """The values, with small statistics of the same choices as one row, below the others."""
    small = _SMALL * sum(value.nbytes for value in values)
    alike: dict[tuple[str, ...], list[DecidedValue]] = {}
    for value in values:
        if value.role == "statistic" and value.nbytes < small:
            alike.setdefault(value.choices, []).append(value)
    several = [group for group in alike.values() if len(group) > 1]
    folded = {value for group in several for value in group}
    sums = [
        replace(group[0], label=f"{len(group)} statistics", dtype="", nbytes=sum(value.nbytes for value in group))
        for group in several
    ]
    return [*(value for value in values if value not in folded), *sums]


def _tensor(value: DecidedValue) -> str:
    """Its shape and dtype; nothing for a row that stands for several."""
    return f"{'x'.join(map(str, value.shape)) or 'scalar'} {value.dtype}" if value.dtype else ""


def _policies(policies: Sequence[UsedPolicy]) -> RenderableType:
    rows = [
        (shortened(policy.blocks, _BLOCKS), human_bytes(policy.held_bytes), f"{1000 * policy.added_seconds:.3f} ms")
        for policy in policies
    ]
    header = ("", "held by a call", "added to a call")
    return grid(header, rows, header[1:])


def _width(columns: Sequence[Sequence[str]]) -> int:
    """Characters that the columns take side by side."""
    return INDENT + sum(max(map(len, column)) for column in columns) + GAP * (len(columns) - 1)
