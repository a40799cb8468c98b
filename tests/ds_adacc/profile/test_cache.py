"""Profiles come back equal, whatever other processes do, and no file or disk stops a run."""

import ast
import errno
import json
import multiprocessing
import os
import shutil
from datetime import datetime
from pathlib import Path

import pytest
import torch
from cache_worker import profile, save_many
from forks import start

from ds_adacc import environment, kernels
from ds_adacc.config import load
from ds_adacc.profile import cache
from ds_adacc.profile.cache import ProfileCache, describe, profile_key
from ds_adacc.profile.cache_folder import default_path, sizes

CPU = torch.device("cpu")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "profiles"


@pytest.fixture
def warnings(caplog):
    caplog.set_level("WARNING", logger="ds_adacc")
    return lambda: caplog.messages


def test_a_profile_comes_back_equal(path, warnings):
    ProfileCache(path).save("key", profile())
    assert ProfileCache(path).load("key") == profile()
    assert warnings() == []


def test_the_last_one_saved_counts(path):
    kept = ProfileCache(path)
    kept.save("key", profile(1.0))
    kept.save("key", profile(2.0))
    assert kept.load("key") == profile(2.0)
    assert [entry.name for entry in path.iterdir()] == ["key.json"]
    assert sizes(path) == [(path / "key.json").stat().st_size]


def test_a_key_that_was_never_saved_is_a_miss(path, warnings):
    kept = ProfileCache(path)
    assert kept.load("key") is None
    kept.save("key", profile())
    assert kept.load("other") is None
    assert warnings() == []


def test_people_can_read_a_file(path):
    ProfileCache(path).save("key", profile(), describe(CPU))
    content = (path / "key.json").read_text()
    row = json.loads(content)
    assert list(row) == ["description", "saved", "profile"]
    assert row["description"].startswith(f"{environment.device_name(CPU)}; ds_adacc ")
    assert f"torch {environment.installed('torch')}" in row["description"]
    assert datetime.fromisoformat(row["saved"]).utcoffset().total_seconds() == 0
    assert '"profile":{"graph":{"values":[{"name":"x","role":"block_input","nbytes":64' in content


def test_counting_makes_no_file(path):
    assert sizes(path) == []
    assert not path.parent.exists()


def test_the_default_is_in_the_cache_folder(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_path() == Path("/somewhere/ds_adacc/profiles")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_path() == Path("/home/me/.cache/ds_adacc/profiles")


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


def changed(old, new):
    return lambda good: good.replace(old, new)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda good: b"", "Invalid JSON"),
        (lambda good: good[:-1], "Invalid JSON"),
        (lambda good: b"not a profile" * 400, "Invalid JSON"),
        (lambda good: good[:100] + b"\xff" * (len(good) - 100), "Invalid JSON"),
        (changed(b"[0.25]", b"[NaN]"), "op_seconds of op 'gelu' is nan; it must be finite and non-negative"),
        (changed(b"[0.25]", b"[1" + 400 * b"0" + b"]"), "op_seconds of op 'gelu' is inf"),
        (changed(b'"graph"', b'"grape"'), "(profile.graph: Field required)"),
        (changed(b'{"graph"', b'["graph"'), "Invalid JSON"),
        (changed(b'"role"', b'"rule"'), "role: Field required)"),
        (lambda good: b'{"of": "another program"}', "Field required)"),
    ],
)
def test_a_damaged_file_alone_is_begun_anew(spoil, told, path, warnings):
    kept = ProfileCache(path)
    kept.save("bad", profile())
    kept.save("good", profile())
    bad = path / "bad.json"
    content = spoil(bad.read_bytes())
    assert content != bad.read_bytes()
    bad.write_bytes(content)
    assert kept.load("bad") is None
    (warning,) = warnings()
    assert warning.startswith("a profile in the cache is damaged (") and told in warning and "\n" not in warning
    assert warning.endswith(f"): its block is measured again, and {bad} is then replaced")
    assert bad.read_bytes() == content
    assert kept.load("good") == profile()
    kept.save("bad", profile())
    assert ProfileCache(path).load("bad") == profile()
    assert len(warnings()) == 1


def unusable(path, reason):
    return (
        f"the profile cache {path} cannot be used ({reason}): from now on this run measures every new block and keeps "
        "no profile. Set XDG_CACHE_HOME to another folder that can be written to, or make room there"
    )


def test_a_folder_that_cannot_be_made_is_one_warning(warnings):
    path = Path("/proc/ds_adacc/profiles")  # where not even root may write
    kept = ProfileCache(path)
    assert kept.load("key") is None
    kept.save("key", profile())
    (warning,) = warnings()
    assert warning.startswith(f"the profile cache {path} cannot be used (")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_one_warning(path, warnings):
    path.mkdir(mode=0o500, parents=True)
    kept = ProfileCache(path)
    assert kept.load("key") is None
    kept.save("key", profile())
    (warning,) = warnings()
    assert warning.startswith(f"the profile cache {path} cannot be used ([Errno 13] Permission denied: ")
    assert list(path.iterdir()) == []


def test_a_file_where_the_folder_would_be_is_one_warning(path, warnings):
    path.parent.mkdir()
    path.write_bytes(b"not a folder")
    kept = ProfileCache(path)
    assert kept.load("key") is None
    kept.save("key", profile())
    assert warnings() == [unusable(path, f"[Errno 20] Not a directory: '{path / 'key.json'}'")]
    assert path.read_bytes() == b"not a folder"


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_takes_nothing_is_one_warning(number, path, warnings, monkeypatch):
    """It may take some of the file before it fails."""

    def write(self, content):
        with open(self, "wb") as file:
            file.write(content[:100])
        raise OSError(number, os.strerror(number))

    ProfileCache(path).save("key", profile())
    monkeypatch.setattr(Path, "write_bytes", write)
    kept = ProfileCache(path)
    assert kept.load("key") == profile()
    kept.save("key", profile(2.0))
    kept.save("other", profile())
    assert kept.load("key") is None
    assert warnings() == [unusable(path, f"[Errno {number}] {os.strerror(number)}")]
    assert [entry.name for entry in path.iterdir()] == ["key.json"]
    assert ProfileCache(path).load("key") == profile()


@pytest.mark.ranks
def test_two_processes_save_at_once(path, warnings):
    """A third one reads what both write: it never sees half of a file."""
    kept, seen = ProfileCache(path), []
    kept.save("both", profile())
    barrier = multiprocessing.get_context("forkserver").Barrier(2)
    children = [start(save_many, path, number, barrier) for number in range(2)]
    while any(child.exitcode is None for child in children):
        seen.append(kept.load("both"))
    assert [child.exitcode for child in children] == [0, 0]
    assert None not in seen and len({each.op_seconds for each in seen}) > 1
    assert kept.load("both") == profile(49)
    assert all(kept.load(f"{number}-{i}") == profile(i) for number in range(2) for i in range(50))
    assert len(sizes(path)) == len(list(path.iterdir())) == 101
    assert warnings() == []


def test_there_is_no_pickle():
    tree = ast.parse(Path(cache.__file__).read_text())
    imports = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert "json" in imports and not imports & {"pickle", "dill", "marshal", "shelve"}
