"""A journal loses nothing that was written, and never stops a run."""

import multiprocessing
import os
import sys
from datetime import datetime
from pathlib import Path

import pytest

from ds_adacc.report import journal
from ds_adacc.report.journal import Journal, JournalError, default_path, folder, latest, read


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "run.jsonl"


@pytest.fixture
def warnings(caplog):
    caplog.set_level("WARNING", logger="ds_adacc")
    return lambda: caplog.messages


def spoiled(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    return path


def without_time(events):
    return [{key: value for key, value in event.items() if key != "time"} for event in events]


def test_events_come_back_in_order(path):
    journal = Journal(path)
    journal.write("start", ranks=2, device="CPU\nof two lines", section={"codecs": "none"}, blocks=["Blöck"])
    journal.write("observed", step=1, held={"planned": 3, "observed": 4}, peak=None, seconds=None)
    assert without_time(read(path)) == [
        {
            "event": "start",
            "ranks": 2,
            "device": "CPU\nof two lines",
            "section": {"codecs": "none"},
            "blocks": ["Blöck"],
        },
        {"event": "observed", "step": 1, "held": {"planned": 3, "observed": 4}, "peak": None, "seconds": None},
    ]
    assert path.read_bytes().count(b"\n") == 2


def test_the_time_has_a_zone(path):
    before = datetime.now().astimezone()
    Journal(path).write("start", text="x")
    (event,) = read(path)
    assert list(event) == ["event", "time", "text"]
    time = datetime.fromisoformat(event["time"])
    assert time.utcoffset() is not None
    assert -0.001 <= (time - before).total_seconds() < 60


def test_a_line_is_on_the_disk_once_written(path):
    journal = Journal(path)
    for count in range(1, 4):
        journal.write("start", text="x" * 100_000)
        assert len(read(path)) == count


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Journal(None).write("start", text="x")
    assert list(tmp_path.iterdir()) == []


def test_a_fork_adds_to_the_same_file(path):
    journal = Journal(path)
    journal.write("start", text="parent")
    child = multiprocessing.get_context("fork").Process(target=journal.write, args=("start",), kwargs={"text": "x"})
    child.start()
    child.join(60)
    journal.write("start", text="parent")
    assert [event["text"] for event in read(path)] == ["parent", "x", "parent"]


def test_a_disk_that_fails_is_one_warning(warnings):
    path = Path("/dev/full")  # every write to it finds the disk full
    journal = Journal(path)
    journal.write("start", text="x")
    journal.write("start", text="x")
    told = (
        f"the run goes on without its journal {path}, so `ds_adacc report` will not show it: [Errno 28] No space left"
    )
    assert warnings() == [f"{told} on device"]


def test_a_folder_that_cannot_be_made_is_one_warning(warnings, tmp_path):
    (tmp_path / "file").touch()
    journal = Journal(tmp_path / "file" / "run.jsonl")
    journal.write("start", text="x")
    journal.write("start", text="x")
    (warning,) = warnings()
    assert warning.startswith(f"the run goes on without its journal {tmp_path / 'file' / 'run.jsonl'}, so ")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object()])
def test_what_json_cannot_hold_is_refused_before_anything_is_written(value, path):
    with pytest.raises((TypeError, ValueError)):
        Journal(path).write("start", text=value)
    assert not path.exists()


@pytest.mark.parametrize("torn", [b'{"event": "war', b'{"event": "x"', b"\xc3", b"\0\0", b""])
def test_a_torn_last_line_is_left_out(torn, path):
    assert read(spoiled(path, b'{"event": "a"}\n' + torn)) == [{"event": "a"}]


def test_a_last_line_that_lacks_only_its_end_counts(path):
    assert read(spoiled(path, b'{"event": "a"}\n{"event": "b"}')) == [{"event": "a"}, {"event": "b"}]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"event": "war', "not a line of JSON: Unterminated string"),
        (b"", "not a line of JSON: Expecting value"),
        (b"\xff", "not a line of JSON: 'utf-8' codec"),
        (b'{"event": "a", "x": NaN}', "not a line of JSON: NaN is no number of JSON's"),
        (
            b"[" * 100_000,
            "not a line of JSON: " + ("maximum recursion depth" if sys.version_info < (3, 14) else "Stack overflow"),
        ),
        (b"[]", 'must be an object with a name as its "event"'),
        (b'{"time": "x"}', 'must be an object with a name as its "event"'),
        (b'{"event": 1}', 'must be an object with a name as its "event"'),
    ],
)
def test_any_other_bad_line_is_an_error_with_its_number(line, told, path):
    with pytest.raises(JournalError) as error:
        read(spoiled(path, b'{"event": "a"}\n' + line + b'\n{"event": "b"}\n'))
    assert str(error.value).startswith(f"{path}:2: {told}")


def test_a_folder_that_cannot_be_looked_at_does_not_stop_a_run(warnings, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / (300 * "x")))  # even root may not: the name is too long
    Journal.of_this_run().write("start")
    (warning,) = warnings()
    assert warning.startswith(f"the run goes on without its journal {tmp_path}")


def test_a_missing_journal_is_an_error_with_its_name(path):
    with pytest.raises(JournalError) as error:
        read(path)
    assert str(error.value) == f"{path}: No such file or directory"


def test_journals_lie_in_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = default_path(datetime(2026, 3, 4, 5, 6, 7), 89)
    assert path == tmp_path / "ds_adacc" / "runs" / "20260304-050607-89.jsonl"


def test_two_engines_of_one_second_have_a_journal_each(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for number in range(3):
        Journal.of_this_run().write("start", text=str(number))
    stems = sorted(path.stem for path in folder().iterdir())
    assert [read(folder() / f"{stem}.jsonl")[0]["text"] for stem in stems] == ["0", "1", "2"]
    assert read(latest())[0]["text"] == "2"


def test_the_latest_is_the_run_that_began_last(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert latest() is None
    later, earlier = (default_path(datetime(2026, 3, day), 1) for day in (5, 4))
    for path in (later, earlier):
        Journal(path).write("start", text="x")
    os.utime(later, (0, 0))
    (later.parent / "best.jsonl").touch()
    assert latest() == later


def test_the_oldest_journals_give_way_to_new_ones(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(journal, "_KEPT", 3, raising=False)
    paths = [default_path(datetime(2026, 3, day), 1) for day in range(1, 6)]
    folder().mkdir(parents=True)
    others = [folder() / name for name in ("notes.txt", "20260301-000000-1-best.jsonl", "0.jsonl")]
    for path in (*paths, *others):
        path.touch()
    Journal.of_this_run().write("start", text="x")
    assert read(latest())[0]["text"] == "x"
    assert sorted(folder().iterdir()) == sorted([*paths[-2:], latest(), *others])
