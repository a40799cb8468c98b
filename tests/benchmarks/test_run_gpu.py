"""benchmarks/run_gpu.sh: a rehearsal on the CPU writes the rows of every stage; rows, and what a timeline shows."""

import json
import os
import subprocess

import pytest
import tests_stage
import trace_stage
import training_stage
from cases import cases_that_run, further
from processes import ROOT
from rows import Rows

from ds_adacc.kernels import CODECS

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

BRIEF, LONG = ("probe", "tests", "codecs"), ("training", "largest_batch", "zero3", "trace")
STAGES = [*BRIEF, *map(further, LONG)]
SCRIPT = ROOT / "benchmarks" / "run_gpu.sh"


def run(*arguments, **environment):
    return subprocess.run([SCRIPT, *arguments], env=os.environ | environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def rehearsed(request, tmp_path_factory):
    """The rows of each stage, by name, of a rehearsal. The long stages are left out where no test of them runs."""
    out, scratch = (tmp_path_factory.mktemp(name) for name in ("out", "scratch"))
    stages = [*BRIEF, *(stage for stage in cases_that_run(request, "stage") if stage in LONG)]
    result = run("--rehearse", out, *stages, SCRATCH=str(scratch))
    log = (out / "run.log").read_text()
    assert result.returncode == 0, f"{result.stdout}{result.stderr}\n{log[-5000:]}"
    found = {}
    for stage in stages:
        rows = [json.loads(line) for line in (out / f"{stage}.jsonl").read_text().splitlines()]
        found[stage] = {row["name"]: row for row in rows}
        assert len(found[stage]) == len(rows)
    assert not list(out.glob("*.running"))
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_no_row_fails_or_is_skipped(rehearsed, stage):
    assert rehearsed[stage]
    for row in rehearsed[stage].values():
        assert {"error", "out_of_memory", "skipped", "infeasible"}.isdisjoint(row), row


def test_the_probe_says_which_operator_runs_and_whether_it_is_replayed(rehearsed):
    row = rehearsed["probe"]["attention flash float32 mask causal dropout 0.0"]
    (operator,) = row["operators"]
    assert operator["operator"] == "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert operator["outputs"] == ["float32 [2, 2, 16, 64] cpu", "float32 [2, 2, 16] cpu"]
    assert row["verdicts"] == {"_scaled_dot_product_flash_attention_for_cpu: is replayed": 2}
    assert "unavailable" in rehearsed["probe"]["attention cudnn float32 mask none dropout 0.0"]
    assert rehearsed["probe"]["doctor"]["fine"] is True


def test_the_tests_that_need_a_gpu_are_found(rehearsed):
    assert {row.get("outcome") for name, row in rehearsed["tests"].items() if name != "all tests"} == {"skipped"}
    assert "error" not in rehearsed["tests"]["all tests"]


def test_tests_for_which_no_time_was_left_are_an_error(tmp_path):
    rows = Rows(tmp_path / "tests.jsonl", seconds=0.0)
    reporter = tests_stage.Reporter(rows)
    reporter.waiting = {"tests/test_b.py::test_2", "tests/test_a.py::test_1"}
    assert rows.write("all tests", lambda: tests_stage.finished(reporter)) is None
    assert rows.has_failed
    assert (
        "no time was left for 2 tests; the first is tests/test_a.py::test_1" in (tmp_path / "tests.jsonl").read_text()
    )


def test_the_codecs_give_the_bits_of_the_reference(rehearsed):
    assert len(rehearsed["codecs"]) == 2 * len(CODECS)
    assert all(row["compress_of_ideal"] > 0 for row in rehearsed["codecs"].values())


@pytest.mark.parametrize("stage", [further("training")])
def test_every_strategy_trains_with_the_same_weights(rehearsed, stage):
    rows = rehearsed[stage]
    assert set(rows) == {f"{model} {name}" for model, names in training_stage.REHEARSED.items() for name in names}
    for name, row in rows.items():
        is_exact = "default" not in name and "compiled" not in name
        assert 0 <= row["gradient_error"] <= (0 if is_exact else 0.2), name
        assert row["tokens_per_second"] > 0 and row["peak_bytes"] > 0
        assert row["loss"] == rows[name.split()[0] + " none"]["loss"] or "compiled" in name
    whole = rows["GPT ours 1.0"]
    assert whole["planned_peak_bytes"] == whole["planned_without_bytes"]
    assert rows["GPT ours default, 0.4, offload"]["budget_bytes"] == int(0.4 * whole["planned_without_bytes"])


@pytest.mark.parametrize("stage", [further("largest_batch")])
def test_the_largest_batch_lies_below_one_that_does_not_fit(rehearsed, stage):
    full = rehearsed[stage]["full"]
    for name in ("none", "full", "ours lossless"):
        row = rehearsed[stage][name]
        assert row["batch"] <= row["most"] == (full["batch"] if name.startswith("ours") else 64)
        assert row["peak_bytes"] <= rehearsed[stage]["begin"]["left_bytes"]
        assert "refused_batch" not in row or row["batch"] < row["refused_batch"]


@pytest.mark.parametrize("stage", [further("zero3")])
def test_zero3_keeps_the_plan(rehearsed, stage):
    none, ours = rehearsed[stage].values()
    assert ours["loss"] == none["loss"]
    assert ours["planned_peak_bytes"] <= 0.4 * ours["planned_without_bytes"]
    assert ours["held_bytes_planned"] == ours["held_bytes_observed"]


def test_of_the_rows_that_are_not_chosen_nothing_is_written(tmp_path):
    result = run(
        "--rows", "kernels (group|token) float32", "--rehearse", tmp_path, "probe", SCRATCH=str(tmp_path / "scratch")
    )
    assert result.returncode == 0, result.stderr
    names = [json.loads(line)["name"] for line in (tmp_path / "probe.jsonl").read_text().splitlines()]
    assert names == ["kernels group float32", "kernels token float32"]


def test_stages_that_do_not_exist_are_refused(tmp_path):
    result = run(tmp_path, "probes")
    assert result.returncode == 2
    assert "there is no stage probes" in result.stderr and "probe tests codecs" in result.stderr


def events(*rows):
    return [{"cat": cat, "name": name, "ts": start, "dur": end - start} for cat, name, start, end in rows]


def test_what_a_timeline_shows():
    timeline = events(
        ("kernel", "gemm", 100.0, 200.0),
        ("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 150.0, 250.0),
        ("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 255.0, 260.0),
        ("kernel", "gemm", 290.0, 300.0),
        ("gpu_user_annotation", "step", 0.0, 1000.0),
    )
    assert trace_stage.shown(timeline, trace_stage.WORK["cuda"]) == {
        "span_us": 200.0,
        "busy_us": 165.0,
        "gaps": 1,
        "gaps_us": 30.0,
        "longest_gap_us": 30.0,
        "host_copies": 1,
        "host_copies_us": 100.0,
        "host_copies_beside_kernels_us": 50.0,
        "longest_us": {
            "gemm": 110.0,
            "Memcpy DtoH (Device -> Pinned)": 100.0,
            "Memcpy DtoD (Device -> Device)": 5.0,
        },
    }
