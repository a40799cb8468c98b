"""Rows are written as they come; what fails, does not fit or has no time left stops none of the others."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rows import DEVICE_LOST, DeviceLost, Rows

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def file(tmp_path):
    return tmp_path / "stage.jsonl"


def written(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def fail():
    raise ValueError("the reason")


def run_out_of_memory():
    raise torch.OutOfMemoryError("tried to allocate 1 GiB\nmore")


def test_a_row_is_there_as_soon_as_it_is_measured(file):
    rows = Rows(file, 60)
    assert (
        rows.measure("one", lambda: {"figure": 1.5, "never": float("nan"), "list": (1, float("inf"))})["figure"] == 1.5
    )
    (row,) = written(file)
    assert row.pop("seconds") >= 0
    assert row == {"name": "one", "figure": 1.5, "never": None, "list": [1, None]}
    assert rows.measured["one"]["figure"] == 1.5 and not rows.has_failed


def test_shares_are_of_a_row_that_was_measured(file):
    rows, row = Rows(file, 60), {"tokens_per_second": 50.0, "peak_bytes": 2}
    rows.measure("none", run_out_of_memory)
    assert rows.shares(row, "none", "none") == {}
    rows.measure("full", lambda: {"tokens_per_second": 40.0, "peak_bytes": 4, "more": 1})
    assert rows.shares(row, "full", "full") == {"tokens_per_second_of_full": 1.25, "peak_bytes_of_full": 0.5}


def test_rows_that_fail_do_not_stop_the_others(file):
    rows = Rows(file, 60)
    assert rows.measure("fails", fail) is None
    assert rows.measure("is too large", run_out_of_memory) is None
    rows.measure("fits", dict)
    failed, large, _ = written(file)
    assert failed["error"].startswith("Traceback") and failed["error"].endswith("ValueError: the reason\n")
    assert large["out_of_memory"] == "tried to allocate 1 GiB"
    assert rows.has_failed and set(rows.measured) == {"fits"}


def test_a_row_without_enough_time_is_skipped(file, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("rows.time.monotonic", lambda: now[0])
    rows = Rows(file, 60)

    def slowly():
        now[0] += 25
        return {}

    rows.measure("a", slowly, "kind")
    rows.measure("b", slowly, "kind")
    assert rows.measure("c", slowly, "kind") is None  # 10 s are left, and others of its kind took 25 s
    assert rows.measure("d", slowly, "other", least=11) is None
    assert rows.measure("e", slowly, "other", spare=10) is None
    assert rows.measure("f", slowly, "other") is not None  # a new kind: nobody knows
    assert rows.measure("g", slowly, "another") is None
    assert rows.write("h", slowly) is not None
    assert [row["name"] for row in written(file) if "skipped" in row] == ["c", "d", "e", "g"]
    assert not rows.has_failed


def test_another_process_goes_on_behind_the_row_that_killed_the_first(file):
    first = Rows(file, 60)
    first.measure("one", lambda: {"figure": 1})
    first.measure("two", fail)
    first.begin("three")
    second = Rows(file, 60, resumes=True)
    for name in ("one", "two", "three"):
        assert (second.measure(name, fail) or {}).get("figure") == (1 if name == "one" else None)
    second.measure("four", dict)
    assert [(row["name"], "error" in row) for row in written(file)] == [
        ("one", False),
        ("two", True),
        ("three", True),
        ("four", False),
    ]
    assert written(file)[2]["error"] == "the process died or hung in this row; see the log"
    assert not file.with_suffix(".running").exists()


def test_a_new_run_begins_anew(file):
    Rows(file, 60).measure("one", dict)
    Rows(file, 60).measure("two", dict)
    assert [row["name"] for row in written(file)] == ["two"]


def test_a_lost_device_ends_the_process_with_the_row_written(file, monkeypatch):
    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    rows = Rows(file, 60)
    rows.measure("fine", dict)
    with pytest.raises(DeviceLost) as raised:
        rows.measure("breaks", fail)
    assert raised.value.code == DEVICE_LOST
    assert [row["name"] for row in written(file)] == ["fine", "breaks"]


def test_a_process_that_hangs_ends_itself_and_tells_where(tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text(
        "import rows, time, pathlib\n"
        "rows.HANGS = 0.2\n"
        "def sleeps():\n    time.sleep(100)\n"
        "rows.Rows(pathlib.Path('stage.jsonl'), 60).measure('one', sleeps)\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{BENCHMARKS}:{os.environ.get('PYTHONPATH', '')}"}
    result = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 1
    assert "in sleeps" in result.stderr
    assert (tmp_path / "stage.running").read_text() == "one"


def test_only_the_rows_whose_whole_names_match_are_measured(file):
    rows = Rows(file, 60, pattern="GPT (none|full)")
    for name in ("GPT none", "GPT full", "GPT full, offloaded", "LLaMA none"):
        assert rows.wants(name) is (rows.measure(name, lambda: {"figure": 1}) is not None)
    assert set(rows.measured) == rows.known == {"GPT none", "GPT full"}
