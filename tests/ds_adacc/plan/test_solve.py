"""What is searched for when no plan fits."""

from ds_adacc import planner
from ds_adacc.plan.plan import PlanRequest
from ds_adacc.plan.solve import smallest_bound


def test_no_bound_is_named_if_every_search_runs_out_of_time(monkeypatch):
    searched = []

    def out_of_time(problem, budget, *, max_seconds):
        searched.append(problem.max_gradient_error)
        if problem.max_gradient_error is not None:
            raise planner.NoSolutionInTime("the machine is busy")

    monkeypatch.setattr(planner, "solve_in_process", out_of_time)
    values = planner.Value("x", "block_input", 0, None, True), planner.Value("y", "other", 64, 0, True)
    graph = planner.BlockGraph(values, (planner.Op("op", (0,), (1,), True),), (planner.Event("end", (1,), 0),))
    block_type = planner.BlockType("b", planner.Profile(graph, (1.0,), ((), ())), count=2)
    assert smallest_bound(PlanRequest({"b": block_type}, [frozenset("b")], {}, 0.09), 100, 5.0) is None
    assert searched[0] is None and 10 <= len(searched) <= 15
