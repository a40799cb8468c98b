"""Programs that were seen to run are remembered, and not without end."""

import pytest
from any_size import Training

from ds_adacc.runtime import seen_programs


@pytest.mark.parametrize("most", [3, 4096])
def test_a_run_of_ever_new_sizes_does_not_fill_the_memory(monkeypatch, most):
    monkeypatch.setattr(seen_programs, "_MOST", most)
    training, counts = Training(memory_budget=0.4, rectifier={"enabled": False}), []
    seen = training.runtime._planned._seen
    for time in (20, 12, 16, 14, 15, 17, 18):
        training.compare(time)
        counts.append(len(seen._seen))
    assert max(counts) == (3 if most == 3 else 7)
