"""The tables of accuracy in the READMEs are the recorded ones."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADER = ["codecs", "seeds", "training loss, end", "validation loss, end", "gradient error, end"]
ARMS = {
    "exact training": "none",
    '`"auto"` (default)': "auto",
    '`"auto"`': "auto",
    '`"paper"`': "paper",
    '`"paper"` without a bound': "paper-unbounded",
    '`"quantization"` (INT4 of everything)': "quantization",
    '`"quantization"`': "quantization",
}


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def table(file, header):
    """The rows of the table with this header."""
    lines = (ROOT / file).read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if cells(line) == header) + 2
    end = next(number for number in range(start, len(lines)) if not lines[number].startswith("|"))
    return [cells(line) for line in lines[start:end]]


@pytest.fixture(scope="module")
def recorded():
    """By injection and arm: seeds, losses at the end of training and of validation, the last gradient error."""
    lines = (ROOT / "benchmarks" / "results" / "accuracy.md").read_text().splitlines()
    header = cells(next(line for line in lines if line.startswith("| injection | arm | seeds")))
    found = {}
    for injection, arm, seeds, validation, _, training, _, _, error, *_ in table(
        "benchmarks/results/accuracy.md", header
    ):
        found[injection, arm] = [seeds, training, validation, error]
    return found


def test_the_readme_has_the_recorded_accuracy(recorded):
    rows = table("README.md", HEADER)
    assert len(rows) >= 4
    assert [row[1:] for row in rows] == [recorded["key-100", ARMS[row[0]]] for row in rows]


def test_the_readme_of_the_benchmarks_has_all_of_it(recorded):
    rows = table("benchmarks/README.md", ["injection", *HEADER])
    assert {(row[0], ARMS[row[1]]): row[2:] for row in rows} == recorded
