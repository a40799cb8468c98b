"""Programs that were seen to run are remembered, and not without end."""

from ds_adacc.runtime import seen_programs
from ds_adacc.runtime.seen_programs import SeenPrograms


def test_a_run_of_ever_new_sizes_does_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(seen_programs, "_MOST", 3)
    seen = SeenPrograms()
    for key in "abcd":
        seen.add(key)
        assert key in seen
    assert not any(key in seen for key in "abc")
