"""Where a result comes from, also where that cannot be known."""

import importlib.util
import shutil
import subprocess

import origin


def test_without_git_the_commit_is_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert origin.origin("a device")["commit"] == "unknown"


def test_the_environment_tells_the_commit_of_a_copy(monkeypatch):
    monkeypatch.setenv("COMMIT", "1234567")
    assert origin.origin("a device")["commit"] == "1234567"


def test_files_that_have_changed_mark_the_commit_but_results_do_not(tmp_path):
    def git(*arguments):
        command = ["git", "-c", "user.name=test", "-c", "user.email=test@example.com", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    source, result = tmp_path / "examples" / "origin.py", tmp_path / "benchmarks" / "results" / "table.md"
    for file in (source, result):
        file.parent.mkdir(parents=True)
    shutil.copy(origin.__file__, source)
    result.write_text("old")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        git(*arguments)
    spec = importlib.util.spec_from_file_location("copied_origin", source)
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    commit = git("rev-parse", "--short", "HEAD")
    result.write_text("new")
    assert copied.origin("a device")["commit"] == commit
    source.write_text(source.read_text() + "\n")
    assert copied.origin("a device")["commit"] == f"{commit}-dirty"
