"""A table as Markdown writes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A line for each row, below those of the header. Cells are written as `str` does."""
    lines = [markdown_row(header), "|---" * len(header) + "|", *map(markdown_row, rows)]
    return "\n".join(lines)


def markdown_row(cells: Iterable[object]) -> str:
    """One line of a table."""
    return f"| {' | '.join(map(str, cells))} |"
