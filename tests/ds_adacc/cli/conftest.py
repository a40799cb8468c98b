import json

import pytest

from ds_adacc.cli.main import main


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """A cache folder of this test's own, and a terminal 80 columns wide."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path / "ds_adacc"


@pytest.fixture
def said(capsys):
    """Runs the command; gives its exit code, stdout and stderr."""

    def run(*arguments):
        code = main(arguments)
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def document(said):
    """Runs the command with --json; gives its exit code and the one document on stdout."""

    def run(*arguments):
        code, out, _ = said(*arguments, "--json")
        return code, json.loads(out)

    return run
