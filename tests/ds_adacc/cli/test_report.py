"""A journal is told of in full, while its run goes on too, and a garbled one is refused with its line."""

import json
import re
from datetime import datetime
from itertools import takewhile

import pytest

from ds_adacc.cli.events import Compared
from ds_adacc.report.journal import Journal, default_path

MIB = 1 << 20

START = {
    "ranks": 2,
    "device": "a processor, 2 threads",
    "versions": {"ds_adacc": "0.1.0", "torch": "2.13.0"},
    "model": "GPT",
    "section": {"memory_budget": 0.25},
    "blocks": ["Block", "Head"],
}
DECISION = {
    "name": "Block",
    "calls": 6,
    "operators": 10,
    "values": [
        {
            "label": "qkv out",
            "name": "addmm1",
            "role": "query",
            "shape": [2048, 1536],
            "dtype": "float32",
            "nbytes": 12 * MIB,
            "choices": ["channel"],
        },
        {
            "label": "[bold]",
            "name": "gelu2",
            "role": "gelu",
            "shape": [4, 512],
            "dtype": "float32",
            "nbytes": 4 * MIB,
            "choices": ["recompute"],
        },
    ],
    "policies": [{"blocks": "all blocks", "held_bytes": 35 * MIB, "added_seconds": 0.0026}],
    "remarks": [],
}
BASELINES = [
    {"name": "full recomputation", "peak": 110 * MIB, "added_seconds": 0.3, "fits": False},
    {"name": "compress all", "peak": 90 * MIB, "added_seconds": 0.25, "fits": True},
]
PLAN = {
    "step": 1,
    "reason": "first step recorded",
    "budget": 100 * MIB,
    "without": 400 * MIB,
    "peak": 95 * MIB,
    "held": 35 * MIB,
    "added_seconds": 0.065,
    "solve_seconds": 0.126,
    "proven_optimal": True,
    "block_types": [DECISION],
    "baselines": BASELINES,
}
OBSERVED = {
    "step": 2,
    "held": {"planned": 40 * MIB, "observed": 50 * MIB},
    "peak": {"planned": 95 * MIB, "observed": 95 * MIB},
    "seconds": {"planned": 0.08, "observed": 0.06},
    "device": {"allocated": 700 * MIB, "reserved": 900 * MIB, "expandable": False},
}
ERRORS = {"step": 3, "bound": 0.1, "errors": [["blocks.0 (Block)", 0.05], ["blocks.1 (Block)", 0.2]]}
RECTIFIER = {"step": 4, "reason": "compression rate of [gelu] drifted", "replanned": True, "changed": 3}


@pytest.fixture
def path():
    """The journal of a run with an event of each kind, and one of a kind that is not known."""
    path = default_path(datetime(2026, 3, 4), 1)
    journal = Journal(path)
    journal.write("start", **START)
    journal.write("plan", **PLAN)
    journal.write("observed", **OBSERVED)
    journal.write("news", anything=[1])
    journal.write("rectifier", **RECTIFIER)
    journal.write("gradient_errors", **ERRORS)
    journal.write("plan", **{**PLAN, "step": 5, "reason": "outliers drifted", "budget": None, "proven_optimal": False})
    journal.write("observed", step=6, held={"planned": 0, "observed": 7}, peak=None, seconds=None)
    return path


def without_time(events):
    times = [datetime.fromisoformat(event.pop("time").replace("Z", "+00:00")) for event in events]  # for Python 3.10
    assert all(time.utcoffset() is not None for time in times)
    return events


def test_the_document_holds_what_the_journal_does(path, document):
    code, told = document("report", str(path))
    assert code == 0
    assert list(told) == ["journal", "starts", "plans", "observed", "rectifier", "gradient_errors", "refused"]
    assert told["journal"] == str(path)
    assert without_time(told["starts"]) == [START]
    second = {**PLAN, "step": 5, "reason": "outliers drifted", "budget": None, "proven_optimal": False}
    assert without_time(told["plans"]) == [PLAN, second]
    assert without_time(told["rectifier"]) == [RECTIFIER]
    assert without_time(told["gradient_errors"]) == [ERRORS]
    assert without_time(told["observed"]) == [
        {
            "step": 2,
            "held": {"planned": 40 * MIB, "observed": 50 * MIB, "difference": 0.25},
            "peak": {"planned": 95 * MIB, "observed": 95 * MIB, "difference": 0.0},
            "seconds": {"planned": 0.08, "observed": 0.06, "difference": (0.06 - 0.08) / 0.08},
            "device": OBSERVED["device"],
        },
        {
            "step": 6,
            "held": {"planned": 0, "observed": 7, "difference": None},
            "peak": None,
            "seconds": None,
            "device": None,
        },
    ]


def cells(out, title):
    """The rows of the table below a title, as lists of cells."""
    _, *lines = out[out.index(f"\n{title}\n") + 1 :].splitlines()
    rows = takewhile(lambda line: line.startswith("  "), lines)
    return [re.split(r"\s{2,}", row.strip()) for row in rows]


def test_the_plans_are_told_over_time(path, said):
    code, out, err = said("report", str(path))
    assert (code, err) == (0, "")
    assert cells(out, "Plans")[1:] == [
        ["1", "100.00 MiB", "95.00 MiB", "0.24", "35.00 MiB", "65.0", "0.126", "yes"],
        ["5", "none", "95.00 MiB", "0.24", "35.00 MiB", "65.0", "0.126", "no"],
    ]
    assert cells(out, "Why they were made")[1:] == [["1", "first step recorded"], ["5", "outliers drifted"]]


def test_a_journal_of_an_earlier_version_tells_blocks_by_number(path, said):
    Journal(path).write("gradient_errors", **ERRORS | {"block_type": "Block", "errors": [[1, 0.05], [2, 0.2]]})
    _, out, _ = said("report", str(path))
    assert cells(out, "Gradient errors")[-1] == ["3", "1-2", "2", "0.2", "0.1", "2"]


def test_gradient_errors_stand_beside_their_bound(path, said):
    _, out, _ = said("report", str(path))
    assert cells(out, "Gradient errors") == [
        ["step", "blocks", "measured", "largest error", "bound", "above it"],
        ["3", "blocks.0-1 (Block)", "2", "0.2", "0.1", "blocks.1 (Block)"],
    ]


def test_predictions_stand_beside_what_was_observed(path, said):
    _, out, _ = said("report", str(path))
    assert cells(out, "Planned and observed") == [
        ["step", "what", "of", "planned", "observed", "difference"],
        ["2", "held", "the batch of that step", "40.00 MiB", "50.00 MiB", "+25.0%"],
        ["2", "peak", "the planned batch", "95.00 MiB", "95.00 MiB", "+0.0%"],
        ["2", "seconds", "the timed calls", "80.0 ms", "60.0 ms", "-25.0%"],
        ["6", "held", "the batch of that step", "0 B", "7 B", "-"],
    ]
    assert "\npeak is of the batch that the plan was made for. Observed is the planned peak,\n" in out


def test_a_long_name_is_not_broken_in_a_file(path, said, monkeypatch):
    monkeypatch.delenv("COLUMNS")
    name, why = "model.layers.0 (LlamaDecoderLayer)", f"compression rate of {'a' * 90} drifted"
    Journal(path).write("gradient_errors", **{**ERRORS, "errors": [[name, 0.2]]})
    Journal(path).write("rectifier", **{**RECTIFIER, "reason": why})
    _, out, _ = said("report", str(path))
    assert cells(out, "Gradient errors")[-1] == ["3", name, "1", "0.2", "0.1", name]
    assert cells(out, "Rectifier")[-1] == ["4", why, "yes", "3"]


def test_the_rest_is_told_too(path, said):
    _, out, _ = said("report", str(path))
    assert cells(out, "Rectifier")[1:] == [["4", "compression rate of [gelu] drifted", "yes", "3"]]
    assert cells(out, "  Block: 6 calls held at once, 10 operators each") == [
        ["value", "role", "tensor", "raw", "all blocks"],
        ["qkv out", "query", "2048x1536 float32", "12.00 MiB", "channel"],
        ["[bold]", "gelu", "4x512 float32", "4.00 MiB", "recompute"],
    ]
    assert "  all blocks       35.00 MiB         2.600 ms\n" in out
    assert cells(out, "Other strategies")[1:] == [
        ["full recomputation", "110.00 MiB", "300.0", "no"],
        ["compress all", "90.00 MiB", "250.0", "yes"],
    ]
    assert " with 2 ranks on a processor, 2 threads\nds_adacc 0.1.0, torch 2.13.0\nblocks of GPT: Block, Head\n" in out
    assert all(len(line) <= 80 for line in out.splitlines()[1:])


def test_a_journal_that_does_not_name_the_model(tmp_path, said):
    Journal(tmp_path / "run.jsonl").write("start", **{key: START[key] for key in START if key != "model"})
    assert "\nblocks: Block, Head\n" in said("report", str(tmp_path / "run.jsonl"))[1]


def test_all_of_a_large_plan_is_told_if_asked_for(path, said):
    value = DECISION["values"][0]
    values = [{**value, "label": f"mlp.fc{n} out", "nbytes": n + 1} for n in range(70)]
    types = [{**DECISION, "name": f"h.{n} (Block)", "operators": n, "values": values} for n in range(9)]
    Journal(path).write("plan", **{**PLAN, "step": 8, "block_types": types})
    _, brief, _ = said("report", str(path))
    _, full, _ = said("report", "--full", str(path))
    hint = "  ds_adacc report --full shows everything\n"
    assert hint in brief and brief.count("calls held at once") == 2 and "mlp.fc3 out" not in brief
    assert hint not in full and full.count("calls held at once") == 9
    assert all(full.count(f" mlp.fc{n} out ") == 9 for n in range(70))
    assert len(brief.splitlines()) < 90 < len(full.splitlines())


def test_the_latest_journal_is_told_of(path, document):
    earlier = default_path(datetime(2026, 3, 3), 2)
    Journal(earlier).write("start", **START)
    assert document("report")[1]["journal"] == str(path)


def test_a_run_still_going_is_told_of_so_far(path, document, said):
    first, *_ = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b'{"event": "plan", "st')
    code, told = document("report", str(path))
    assert code == 0
    assert without_time(told["starts"]) == [START]
    assert told["plans"] == told["observed"] == told["rectifier"] == []
    shown = said("report", str(path))[1]
    assert "Plans" not in shown
    assert f"no plan yet: the last event is of {json.loads(first)['time'][11:19]}. The first plan comes" in shown


def test_a_run_without_blocks_says_what_to_do(path, said):
    path.unlink()
    Journal(path).write("start", **{**START, "blocks": []})
    code, shown, _ = said("report", str(path))
    assert (code, "no plan yet" in shown) == (0, False)
    assert "no plan, as no block was found in the model. If it does not run" in shown


def test_a_run_that_ended_as_no_plan_fits_says_what_would(path, document, said):
    first, *_ = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first)
    text = "adacc.memory_budget: no plan fits 9 bytes.\n  The smallest budget that fits is 12 B"
    Journal(path).write("refused", text=text)
    code, told = document("report", str(path))
    assert code == 0
    assert without_time(told["refused"]) == [{"text": text}]
    shown = said("report", str(path))[1]
    assert f": engine.step() raised an error:\n{text}" in shown
    assert "no plan yet" not in shown


def test_an_empty_journal_is_no_error(tmp_path, said):
    path = tmp_path / "x"
    path.touch()
    assert said("report", str(path)) == (0, f"{path}\nthe journal holds no event yet\n", "")


def test_without_any_journal_the_folder_is_named(cache, said):
    code, out, told = said("report")
    assert (code, out) == (2, "")
    assert told.startswith(f"ds_adacc report: no run has left a journal in {cache / 'runs'}. If that folder could not")


def test_a_folder_of_journals_that_cannot_be_looked_at_is_named(monkeypatch, tmp_path, said):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / (300 * "x")))
    code, out, told = said("report")
    assert (code, out) == (2, "")
    assert told.startswith(
        "ds_adacc report: the folder of the journals cannot be read: [Errno 36] File name too long: "
    )
    assert told.endswith("Name a journal, or set XDG_CACHE_HOME as in the run\n")


def test_a_missing_journal_is_bad_input(tmp_path, said):
    path = tmp_path / "missing.jsonl"
    assert said("report", str(path), "--json") == (2, "", f"ds_adacc report: {path}: No such file or directory\n")


GARBLED = [
    ("{", "not a line of JSON: "),
    ('{"event": "plan", "time": "2026-03-04T00:00:00+00:00"}', "plan.step: Field required"),
    ('{"event": "rectifier", "reason": "x"}', "rectifier.time: Field required"),
    ('{"event": "rectifier", "time": "soon", "reason": "x"}', "rectifier.time: Input should be a valid datetime"),
    (
        json.dumps(
            {
                "event": "plan",
                "time": "2026-03-04T00:00:00+00:00",
                **PLAN,
                "block_types": [{**DECISION, "policies": []}],
            }
        ),
        "plan.block_types: Value error, value 'qkv out' has 1 choices for 0 policies",
    ),
    (
        json.dumps({"event": "plan", "time": "2026-03-04T00:00:00+00:00", **PLAN, "added_seconds": 0.5}).replace(
            "0.5,", "1e999,"
        ),
        "plan.added_seconds: Input should be a finite number",
    ),
    (
        json.dumps({"event": "plan", "time": "2026-03-04T00:00:00+00:00", **PLAN, "peak": 10**400}),
        "plan.peak: Input should be less than 9223372036854775808",
    ),
    (
        json.dumps({"event": "observed", "time": "2026-03-04T00:00:00+00:00", **OBSERVED, "held": {"planned": "much"}}),
        "observed.held.planned",
    ),
]


@pytest.mark.parametrize(("line", "told"), GARBLED)
def test_a_garbled_journal_is_bad_input(line, told, path, said):
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[2:], ""]))
    code, out, err = said("report", str(path))
    assert (code, out) == (2, "")
    assert err.startswith(f"ds_adacc report: {path}:3: {told}") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("planned", "observed", "difference"), [(4, 5, 0.25), (4, 4, 0.0), (0, 0, None), (2.0, 1, -0.5)]
)
def test_differences_are_relative_to_the_prediction(planned, observed, difference):
    assert Compared(planned=planned, observed=observed).difference == difference
