"""The benchmarks on varying lengths take steps: a few of them, for what a machine of any speed can tell."""

import lengths
import lengths_memory
import pytest


@pytest.mark.further
def test_every_step_has_the_exact_gradient():
    row = lengths.measure(next(iter(lengths.PROGRAMS)), count=3, budget=0.6)
    assert row.steps == 3 and row.is_exact and row.recordings > 0
    assert row.plans >= 1


def test_a_run_has_the_peak_and_the_level_of_each_step():
    run = lengths_memory.train(lengths=2, steps=3, is_plain=False)
    assert len(run.peaks) == len(run.levels) == len(run.budgets) == 3
    assert run.budgets[0] is None, "there is no budget before the first plan"
    assert run.budgets[1] > 0
