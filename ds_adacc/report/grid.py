"""Rows and columns, by Rich. `ds_adacc doctor` needs them where neither torch nor the solver can be imported."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

WIDTH = 80  # columns of the log
INDENT = 2
GAP = 2  # between two columns


def plain(part: RenderableType) -> str:
    """The text of a table, or of several, for the log."""
    text = io.StringIO()
    Console(file=text, width=WIDTH, color_system=None).print(part)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[str] = ()) -> Group:
    """A table below its title, its columns `numbers` aligned to the right."""
    return Group(Text(title), grid(header, rows, numbers), Text())


def grid(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[str] = ()) -> RenderableType:
    """A table without a title."""
    numbers = set(numbers)
    made = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
    for name in header:
        made.add_column(Text(name), justify="right" if name in numbers else "left", overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))  # not str, in which Rich takes brackets for markup
    return Padding(made, (0, 0, 0, INDENT), expand=False)
