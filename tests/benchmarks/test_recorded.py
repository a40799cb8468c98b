"""The tables of strategies, accuracy, lengths, first steps and CompAct in the READMEs are the recorded ones."""

from pathlib import Path

import pytest
from tables import cells, table

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


@pytest.fixture(scope="module")
def recorded():
    """By injection and arm: seeds, losses at the end of training and of validation, the last gradient error."""
    text = (ROOT / "benchmarks" / "results" / "accuracy.md").read_text()
    header = cells(next(line for line in text.splitlines() if line.startswith("| injection | arm | seeds")))
    found = {}
    for injection, arm, seeds, validation, _, training, _, _, error, *_ in table(text, header):
        found[injection, arm] = [seeds, training, validation, error]
    return found


def test_the_readme_has_the_recorded_accuracy(recorded):
    rows = table((ROOT / "README.md").read_text(), HEADER)
    assert len(rows) >= 4
    assert [row[1:] for row in rows] == [recorded["key-100", ARMS[row[0]]] for row in rows]


def test_the_readme_of_the_benchmarks_has_all_of_it(recorded):
    rows = table((ROOT / "benchmarks" / "README.md").read_text(), ["injection", *HEADER])
    assert {(row[0], ARMS[row[1]]): row[2:] for row in rows} == recorded


OF_GPUS = [(f, n) for f in ("h100", "h200") for n in ("training", "codecs", "largest_batch", "attention", "tests")]


@pytest.mark.parametrize(("folder", "name"), [*OF_GPUS, ("h200-batch8", "training")])
def test_the_readme_of_the_benchmarks_has_the_rows_of_the_gpu(monkeypatch, folder, name):
    benchmarks = ROOT / "benchmarks"
    monkeypatch.syspath_prepend(benchmarks / "gpu")
    import summary

    assert summary.markdown(benchmarks / "results" / folder, name) in (benchmarks / "README.md").read_text()


RATIOS = ["first 60 steps", "of checkpointing", "new size", "known size", "of checkpointing"]
LEVELS = ["plain, MiB", "ds_adacc, MiB", "plain, KiB a step", "ds_adacc, KiB a step"]


@pytest.mark.parametrize(
    ("file", "header"),
    [
        ("lengths", ["program", "steps", *RATIOS, "blocks recorded", "plans", "exact"]),
        ("lengths", ["program", "size", "first time", "later"]),
        ("lengths-memory", ["lengths", "steps", *LEVELS, "peak / budget"]),
    ],
)
def test_the_readme_of_the_benchmarks_has_the_recorded_lengths(file, header):
    found, rows = (
        table((ROOT / "benchmarks" / path).read_text(), header) for path in (f"results/{file}.md", "README.md")
    )
    assert len(rows) >= 3
    assert rows == found
    assert header[-1] != "exact" or all(is_exact == "yes" for *_, is_exact in found)


def test_the_readmes_have_the_recorded_strategies():
    header = ["strategy", "time", "planned time", "wall clock", "peak", "planned peak", "gradient error"]
    found, rows = (
        table((ROOT / "benchmarks" / path).read_text(), header) for path in ("results/strategies-cpu.md", "README.md")
    )
    assert len(rows) == 12
    assert rows == found
    of_compiled, *_ = (ROOT / "benchmarks" / "results" / "strategies-cpu-compiled.md").read_text().split("\n\n")
    assert of_compiled in (ROOT / "benchmarks" / "README.md").read_text()
    shown = table((ROOT / "README.md").read_text(), ["strategy", "peak", "time", "gradient error"])
    assert len(shown) >= 4
    assert all(row in [[name, peak, time, error] for name, time, _, _, peak, _, error in found] for row in shown)


def test_the_readme_of_the_benchmarks_has_the_recorded_first_steps():
    header = ["model", "size", "codecs", "checkpointing, MiB", *(f"step {number}" for number in range(1, 6))]
    found, rows = (
        table((ROOT / "benchmarks" / path).read_text(), header) for path in ("results/first-steps.md", "README.md")
    )
    assert len(rows) == 3
    assert rows == found


@pytest.mark.parametrize(
    "header",
    [
        ["arm", "seeds", "training loss", "validation loss", "above full training", "CPU time of a step", "paper"],
        ["strategy", "whole peak", "of none", "weights", "gradients", "Adam's states", "activations"],
    ],
)
def test_the_readme_of_the_benchmarks_has_the_recorded_figures_of_compact(header):
    found, rows = (
        table((ROOT / "benchmarks" / path).read_text(), header) for path in ("results/compact.md", "README.md")
    )
    assert len(rows) == 4
    assert rows == found
