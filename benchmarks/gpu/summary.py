"""The rows of run_gpu.sh as tables of Markdown: `python benchmarks/gpu/summary.py FOLDER`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from markdown_table import markdown_table

Row = Mapping[str, Any]
Line = tuple[str, ...]
GIB = 1 << 30


def rows_of(folder: Path, stage: str) -> list[Row]:
    """The stage's rows; none if it has not run."""
    file = folder / f"{stage}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def training(rows: Sequence[Row]) -> Iterator[Line]:
    yield "model", "strategy", "tokens/s", "of none", "peak, GiB", "of none", "predicted", "gradient error"
    measured = {row["name"]: row for row in _with(rows, "tokens_per_second")}
    for name, row in measured.items():
        model, strategy = name.split(" ", 1)
        base = measured.get(f"{model} none")
        planned, seen = row.get("planned_peak_bytes"), row.get("blocks_peak_bytes_observed")
        yield (
            model,
            strategy + (" (the least that fits)" if row.get("is_smallest") else ""),
            f"{row['tokens_per_second']:.0f}",
            _speed(row) or _share(row, base, "tokens_per_second"),
            f"{row['peak_bytes'] / GIB:.2f}",
            _share(row, base, "peak_bytes"),
            f"{planned / seen:.3f}" if planned and seen else "",
            f"{row['gradient_error']:.2g}",
        )


def codecs(rows: Sequence[Row]) -> Iterator[Line]:
    measured = {(row["codec"], row["dtype"], row["mebibytes"]): row for row in _with(rows, "codec")}
    columns = [(size, what) for size in sorted({size for *_, size in measured}) for what in ("compress", "decompress")]
    yield "codec", "dtype", *(f"{what}, {size} MiB" for size, what in columns)
    for codec, dtype in dict.fromkeys((codec, dtype) for codec, dtype, _ in measured):
        found = [(measured.get((codec, dtype, size)), what) for size, what in columns]
        yield codec, dtype, *(f"{row[f'{what}_of_ideal']:.2f}" if row else "" for row, what in found)


def largest_batch(rows: Sequence[Row]) -> Iterator[Line]:
    yield "strategy", "largest batch that ran", "smallest that did not"
    for row in _with(rows, "tried"):
        yield row["name"], str(row.get("batch", "")), str(row.get("refused_batch", ""))


def attention(rows: Sequence[Row]) -> Iterator[Line]:
    """How often each operator of attention was recorded, and how often its replay was proven."""
    yield "operator", "recordings", "replays proven"
    recordings, proven = Counter[str](), Counter[str]()
    for row in _with(rows, "verdicts"):
        for verdict, times in row["verdicts"].items():
            operator, found = verdict.split(": ", 1)
            recordings[operator] += times
            proven[operator] += times * (found == "is replayed")
    yield from ((name, str(times), str(proven[name])) for name, times in recordings.items())


def tests(rows: Sequence[Row]) -> Iterator[Line]:
    yield "outcome", "tests"
    yield from (
        (outcome, str(times)) for outcome, times in Counter(row["outcome"] for row in _with(rows, "outcome")).items()
    )


TABLES: dict[str, tuple[str, Callable[[Sequence[Row]], Iterator[Line]]]] = {
    "training": ("training", training),
    "largest_batch": ("largest_batch", largest_batch),
    "codecs": ("codecs", codecs),
    "attention": ("probe", attention),
    "tests": ("tests", tests),
}


def markdown(folder: Path, name: str) -> str:
    """The table `name` of the rows in the folder."""
    stage, make = TABLES[name]
    header, *lines = make(rows_of(folder, stage))
    return markdown_table(header, lines)


def _with(rows: Sequence[Row], field: str) -> list[Row]:
    return [row for row in rows if field in row]


def _speed(row: Row) -> str:
    """The speed beside the steps that took turns with the row's, and its range; nothing if none did."""
    figures = [row.get(f"relative_speed{end}") for end in ("", "_low", "_high")]
    return "" if None in figures else "{:.3f} ({:.3f}-{:.3f})".format(*figures)


def _share(row: Row, of: Row | None, figure: str) -> str:
    """Nothing if the other row was not measured."""
    return f"{row[figure] / of[figure]:.3f}" if of else ""


if __name__ == "__main__":
    for table, (stage, _) in TABLES.items():
        if rows_of(Path(sys.argv[1]), stage):
            print(f"## {table}\n\n{markdown(Path(sys.argv[1]), table)}\n")
