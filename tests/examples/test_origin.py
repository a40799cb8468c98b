"""Where a result comes from, also where that cannot be known."""

from origin import origin


def test_without_git_the_commit_is_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert origin("a device")["commit"] == "unknown"
