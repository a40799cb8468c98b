"""How long ranks wait for the first one, which plans."""

from datetime import timedelta

import pytest

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.plan import ranks
from ds_adacc.plan.plan import PlanRequest
from ds_adacc.plan.ranks import Ranks
from ds_adacc.plan.solve import Forgiven, solve

MAX_SECONDS = 900.0


@pytest.mark.parametrize(("max_seconds", "waits"), [(5.0, timedelta(minutes=55)), (900.0, timedelta(hours=75.5))])
def test_ranks_wait_for_as_long_as_the_first_one_may_search(monkeypatch, max_seconds, waits):
    made = []
    monkeypatch.setattr("torch.distributed.new_group", lambda ranks, **given: made.append((ranks, given["timeout"])))
    Ranks([0, 1], max_seconds)
    Ranks([0], max_seconds)
    assert made == [([0, 1], waits)]


@pytest.fixture
def seconds(monkeypatch):
    """What a solver would take that finds no plan, and uses all the time that it is given."""
    taken = []

    def solve_in_process(problem, budget, *, max_seconds):
        taken.append(2 * max_seconds)
        if problem.max_gradient_error is not None:
            raise planner.InfeasibleBudget(budget, 100)
        return planner.everywhere(planner.retain_policy, problem)

    def least_peak_in_process(problem, *, max_seconds):
        taken.append(2 * max_seconds)
        return planner.everywhere(planner.retain_policy, problem)

    monkeypatch.setattr(planner, "solve_in_process", solve_in_process)
    monkeypatch.setattr(planner, "least_peak_in_process", least_peak_in_process)
    return taken


def block_type(name):
    values = planner.Value("x", "block_input", 64, None, True), planner.Value("y", "other", 64, 0, True)
    graph = planner.BlockGraph(values, (planner.Op("f", (0,), (1,), True),), (planner.Event("end", (1,), 0),))
    return planner.BlockType(name, planner.Profile(graph, (1.0,), ((), ())), count=2)


@pytest.mark.parametrize("forgiven", Forgiven)
@pytest.mark.parametrize("live_sets", [["a"], ["a", "b"], ["ab", "bc", "ac"]])
def test_no_live_set_is_searched_for_longer_than_that(seconds, live_sets, forgiven):
    types = {name: block_type(name) for name in "abc"}
    request = PlanRequest(types, [frozenset(names) for names in live_sets], {}, 0.09)
    config = load({"adacc": {"solver": {"max_seconds": MAX_SECONDS}}})
    try:
        solve(request, 10, config, {}, forgiven)
    except planner.InfeasibleBudget:
        assert forgiven is not Forgiven.ALL
    assert 0 < sum(seconds) <= len(live_sets) * ranks._SEARCHES / 20 * MAX_SECONDS
