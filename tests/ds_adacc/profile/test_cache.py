"""Profiles come back equal, whatever other processes do, and no file or disk stops a run."""

import ast
import multiprocessing
import os
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import torch
from cache_worker import profile, save_many
from forks import start

from ds_adacc import environment, kernels
from ds_adacc.config import load
from ds_adacc.profile import cache
from ds_adacc.profile.cache import APPLICATION_ID, SCHEMA_VERSION, ProfileCache, default_path, describe, profile_key

CPU = torch.device("cpu")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "profiles.sqlite"


@pytest.fixture
def warnings(caplog):
    caplog.set_level("WARNING", logger="ds_adacc")
    return lambda: [record.getMessage() for record in caplog.records]


def execute(path, *statements):
    path.parent.mkdir(exist_ok=True)
    with closing(sqlite3.connect(path)) as connection, connection:
        return [connection.execute(*statement).fetchall() for statement in statements]


def refuse(monkeypatch, statement):
    """Every connection begins with a statement that makes a disk of it that fails."""
    connect = cache._connect

    def connected(path):
        connection = connect(path)
        connection.execute(statement)
        return connection

    monkeypatch.setattr(cache, "_connect", connected)


def test_a_profile_comes_back_equal(path, warnings):
    ProfileCache(path).save("key", profile())
    assert ProfileCache(path).load("key") == profile()
    assert warnings() == []


def test_the_last_one_saved_counts(path):
    kept = ProfileCache(path)
    kept.save("key", profile(1.0))
    kept.save("key", profile(2.0))
    assert kept.load("key") == profile(2.0)
    assert kept.count() == 1


def test_a_key_that_was_never_saved_is_a_miss(path, warnings):
    kept = ProfileCache(path)
    assert kept.load("key") is None
    kept.save("key", profile())
    assert kept.load("other") is None
    assert warnings() == []


def test_people_can_read_a_row(path):
    ProfileCache(path).save("key", profile(), describe(CPU))
    ((row,),) = execute(path, ["SELECT key, description, saved, profile FROM profiles"])
    assert row[0] == "key"
    assert row[1].startswith(f"{environment.device_name(CPU)}; ds_adacc ")
    assert f"torch {environment.installed('torch')}" in row[1]
    assert datetime.fromisoformat(row[2]).utcoffset().total_seconds() == 0
    assert row[3].startswith('{"graph":{"values":[{"name":"x","role":"block_input","nbytes":64')


def test_counting_makes_no_file(path):
    assert ProfileCache(path).count() == 0
    assert not path.parent.exists()


def test_the_default_is_in_the_cache_folder(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_path() == Path("/somewhere/ds_adacc/profiles.sqlite")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_path() == Path("/home/me/.cache/ds_adacc/profiles.sqlite")


def key(digest="d", code="c", offers=((), ("outlier",)), **section):
    return profile_key(digest, code, offers, CPU, load({"adacc": section}))


def test_a_key_is_the_same_for_the_same_measurement():
    assert key() == key(offers=[[], ["outlier"]]) == key(memory_budget=0.5, codecs="none", rectifier={"drift": 0.5})
    assert len(key()) == 64 and int(key(), 16)


@pytest.mark.parametrize(
    "changed",
    [
        {"digest": "e"},
        {"code": "d"},
        {"offers": ((), ("group",))},
        {"offers": (("outlier",), ())},
        {"backend": "reference"},
        {"group_size": 64},
        {"scale": "paper"},
        {"rounding": "stochastic"},
        {"zscore_threshold": 2.5},
    ],
)
def test_what_changes_a_measurement_changes_the_key(changed):
    assert key(**changed) != key()


@pytest.mark.parametrize(
    ("holder", "name", "value"),
    [
        (torch.backends.cuda.matmul, "fp32_precision", "tf32"),
        (torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
        (torch.backends.cuda.matmul, "allow_fp16_accumulation", True),
        (torch.backends.cudnn, "benchmark", True),
    ],
)
def test_a_switch_of_torch_changes_the_key(holder, name, value):
    before, was = key(), getattr(holder, name)
    setattr(holder, name, value)
    try:
        assert key() != before
    finally:
        setattr(holder, name, was)
    assert key() == before


@pytest.mark.parametrize(
    ("switch", "value", "was"),
    [
        (torch.set_float32_matmul_precision, "medium", "highest"),
        (torch.use_deterministic_algorithms, True, False),
    ],
)
def test_a_mode_of_torch_changes_the_key(switch, value, was):
    switch(was)
    before = key()
    switch(value)
    try:
        assert key() != before
    finally:
        switch(was)
    assert key() == before


@pytest.mark.parametrize("package", ["torch", "ds_adacc", "deepspeed", "numba", "cupy", "cupy-cuda13x", "liger-kernel"])
def test_another_version_changes_the_key(package, monkeypatch):
    before, version = key(), environment.metadata.version
    monkeypatch.setattr(environment.metadata, "version", lambda name: "0" if name == package else version(name))
    assert key() != before


@pytest.mark.parametrize("edited", ["codec.py", "cpu/groups.py", "cuda/sources/bits.cu", "cuda/sources/common.cuh"])
def test_an_edited_kernel_changes_the_key(edited, tmp_path, monkeypatch):
    keys = {}
    for name in ("as it is", "copied", "edited"):
        if name != "as it is":
            copy = tmp_path / name
            shutil.copytree(Path(kernels.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
            if name == "edited":
                (copy / edited).write_text((copy / edited).read_text() + "\n")
            monkeypatch.setattr(kernels, "__file__", str(copy / "__init__.py"))
        keys[name] = key()
    assert keys["as it is"] == keys["copied"] != keys["edited"]


def test_another_way_to_measure_changes_the_key(tmp_path, monkeypatch):
    before, copy = key(), tmp_path / "profile"
    shutil.copytree(Path(cache.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "timer.py").write_text((copy / "timer.py").read_text() + "\n")
    monkeypatch.setattr(cache, "_ROOM", copy)
    assert key() != before


def test_the_sources_are_read_once_a_process(monkeypatch):
    before = key()
    monkeypatch.setattr(Path, "read_bytes", None)
    assert key() == before


def test_what_is_not_installed_is_left_out(monkeypatch):
    def version(name):
        if name not in ("ds_adacc", "torch", "flash-attn"):
            raise environment.metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(environment.metadata, "version", version)
    assert environment.versions() == {"ds_adacc": "1", "torch": "1", "flash-attn": "1"}


def test_another_device_changes_the_key(monkeypatch):
    before = key()
    monkeypatch.setattr(environment, "_processor", lambda: "another processor")
    assert key() != before
    monkeypatch.undo()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert key() != before
    assert environment.device_name(CPU).endswith(", 77 threads")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a GPU named {device}")
    assert environment.device_name(torch.device("cuda", 1)) == "a GPU named cuda:1"


def damaged(path):
    path.parent.mkdir()
    path.write_bytes(b"not a database" * 400)
    return "file is not a database"


def foreign(path):
    execute(path, ["CREATE TABLE theirs (x)"], ["PRAGMA application_id = 7"])
    return f"are (7, 0, 1), not ({APPLICATION_ID}, {SCHEMA_VERSION}, 1)"


def unmarked(path):
    execute(path, ["CREATE TABLE theirs (x)"])
    return f"are (0, 0, 1), not ({APPLICATION_ID}, {SCHEMA_VERSION}, 1)"


def older(path):
    ProfileCache(path).save("key", profile())
    execute(path, ["PRAGMA user_version = 0"])
    return f"are ({APPLICATION_ID}, 0, 1), not ({APPLICATION_ID}, {SCHEMA_VERSION}, 1)"


def overwritten(path):
    """Sound at its head only: what is wrong shows when a row is read."""
    ProfileCache(path).save("key", profile())
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)
    return "(Page 2: "


@pytest.mark.parametrize("spoil", [damaged, foreign, unmarked, older, overwritten])
def test_a_file_that_cannot_be_used_is_moved_aside(spoil, path, warnings):
    reason = spoil(path)
    before = path.read_bytes()
    kept = ProfileCache(path)
    assert kept.load("key") is None
    aside = path.with_name("profiles.sqlite.bad")
    assert aside.read_bytes() == before
    (warning,) = warnings()
    assert (
        warning.startswith(f"the profile cache {path} is damaged, or another version wrote it (") and reason in warning
    )
    assert f"): it was renamed to {aside}, which you may delete; " in warning
    kept.save("key", profile())
    assert ProfileCache(path).load("key") == profile()
    assert len(warnings()) == 1


def test_what_was_moved_aside_is_never_written_over(path):
    path.parent.mkdir()
    for content in (b"first" * 200, b"second" * 200):
        path.write_bytes(content)
        ProfileCache(path).save("key", profile())
    assert path.with_name("profiles.sqlite.bad").read_bytes() == b"first" * 200
    assert path.with_name("profiles.sqlite.bad1").read_bytes() == b"second" * 200


def test_counting_leaves_a_damaged_file_alone(path):
    damaged(path)
    with pytest.raises(sqlite3.DatabaseError, match="file is not a database"):
        ProfileCache(path).count()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("[0.25]", "[NaN]", "op_seconds of op 'gelu' is nan; it must be finite and non-negative"),
        ("[0.25]", "[1" + 400 * "0" + "]", "op_seconds of op 'gelu' is inf"),
        ('"graph"', '"grape"', "(graph: Field required)"),
        ('{"graph"', '["graph"', "Invalid JSON"),
        ('"role"', '"rule"', "role: Field required)"),
    ],
)
def test_a_bad_row_alone_is_deleted(old, new, told, path, warnings):
    kept = ProfileCache(path)
    kept.save("bad", profile())
    kept.save("good", profile())
    execute(path, ["UPDATE profiles SET profile = replace(profile, ?, ?) WHERE key = 'bad'", (old, new)])
    assert kept.load("bad") is None
    (warning,) = warnings()
    assert warning.startswith("a profile in the cache is damaged (") and told in warning and "\n" not in warning
    assert kept.load("good") == profile()
    assert execute(path, ["SELECT key FROM profiles"]) == [[("good",)]]
    assert len(warnings()) == 1


def test_a_row_that_a_flipped_bit_has_made_no_utf_8_is_deleted_alone(path, warnings):
    kept = ProfileCache(path)
    kept.save("good", profile())
    kept.save("bad", replace(profile(), noise=0.0625))
    content = path.read_bytes()
    at = content.index(b'"noise":0.0625') + 1
    path.write_bytes(content[:at] + bytes([content[at] | 0x80]) + content[at + 1 :])
    assert kept.load("bad") is None
    (warning,) = warnings()
    assert warning.startswith("a profile in the cache is damaged (")
    assert kept.load("good") == profile()
    assert execute(path, ["SELECT key FROM profiles"]) == [[("good",)]]
    kept.save("bad", profile())
    assert kept.load("bad") == profile()
    assert len(warnings()) == 1


def unusable(path, reason):
    return (
        f"the profile cache {path} cannot be used ({reason}): from now on this run measures every new block and keeps "
        "no profile. Set XDG_CACHE_HOME to another folder that can be written to, or make room there"
    )


def test_a_folder_that_cannot_be_made_is_one_warning(warnings):
    path = Path("/proc/ds_adacc/profiles.sqlite")  # where not even root may write
    kept = ProfileCache(path)
    assert kept.load("key") is None
    kept.save("key", profile())
    (warning,) = warnings()
    assert warning.startswith(f"the profile cache {path} cannot be used (")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_one_warning(path, warnings):
    path.parent.mkdir(mode=0o500)
    kept = ProfileCache(path)
    assert kept.load("key") is None
    kept.save("key", profile())
    assert warnings() == [unusable(path, "unable to open database file")]


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("PRAGMA query_only = 1", "attempt to write a readonly database"),
        ("PRAGMA max_page_count = 1", "database or disk is full"),
    ],
)
def test_a_disk_that_takes_nothing_is_one_warning(statement, told, path, warnings, monkeypatch):
    ProfileCache(path).save("key", profile())
    refuse(monkeypatch, statement)
    kept = ProfileCache(path)
    assert kept.load("key") == profile()
    kept.save("other", large_profile())
    kept.save("other", profile())
    assert kept.load("key") is None
    assert warnings() == [unusable(path, told)]


def large_profile():
    """A profile whose row needs pages of its own."""
    small = profile()
    long = replace(small.graph.ops[0], name="gelu" * 10_000)
    return replace(small, graph=replace(small.graph, ops=(long,)))


def test_a_lock_that_does_not_come_free_is_one_warning(path, warnings, monkeypatch):
    ProfileCache(path).save("key", profile())
    monkeypatch.setattr(cache, "BUSY_SECONDS", 0.05)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        kept = ProfileCache(path)
        assert kept.load("key") is None
        other.execute("COMMIT")
    kept.save("key", profile())
    assert warnings() == [unusable(path, "database is locked")]


def test_a_lock_is_waited_for_ten_seconds():
    assert cache.BUSY_SECONDS == 10


@pytest.mark.ranks
@pytest.mark.parametrize("content", [None, b"not a database" * 400])
def test_two_processes_save_at_once(content, path):
    if content:
        path.parent.mkdir()
        path.write_bytes(content)
    barrier = multiprocessing.get_context("forkserver").Barrier(2)
    children = [start(save_many, path, number, barrier) for number in range(2)]
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0, 0]
    kept = ProfileCache(path)
    assert kept.count() == 100
    assert all(kept.load(f"{number}-{i}") == profile(i) for number in range(2) for i in range(50))
    aside = sorted(path.parent.glob("*.bad*"))
    assert [entry.read_bytes() for entry in aside] == ([content] if content else [])


def test_a_file_rebuilt_by_another_process_stays(path, warnings, monkeypatch):
    damaged(path)
    run, first = ProfileCache._run, []

    def after_another(self, operation):
        try:
            return run(self, operation)
        except sqlite3.DatabaseError:
            if not first:
                first.append(True)
                path.unlink()
                ProfileCache(path).save("key", profile())
            raise

    monkeypatch.setattr(ProfileCache, "_run", after_another)
    assert ProfileCache(path).load("key") == profile()
    assert warnings() == []


def test_there_is_no_pickle():
    tree = ast.parse(Path(cache.__file__).read_text())
    imports = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert "json" in imports and not imports & {"pickle", "dill", "marshal", "shelve"}
