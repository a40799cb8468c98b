"""Tables of Markdown, as cells."""

from __future__ import annotations


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def table(text, header):
    """The rows of the first table with this header."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if cells(line) == header) + 2
    end = next((number for number in range(start, len(lines)) if not lines[number].startswith("|")), len(lines))
    return [cells(line) for line in lines[start:end]]
