"""What a subcommand gives back, and the tables that it is shown in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text


class BadInput(ValueError):
    """A file or an argument that a subcommand cannot take; the text is for the user."""


@dataclass(frozen=True)
class Answer:
    """`document` is shown with --json, `view` without; `is_yes` false is exit code 1."""

    document: Mapping[str, Any]
    view: RenderableType
    is_yes: bool = True


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[str] = ()) -> Table:
    """A table of plain text, whose columns `numbers` are aligned to the right."""
    numbers = set(numbers)
    made = Table(title=Text(title), title_justify="left")
    for name in header:
        made.add_column(Text(name), justify="right" if name in numbers else "left", overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))  # not str, in which Rich takes brackets for markup
    return made
