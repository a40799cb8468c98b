"""What is searched for when no plan fits, and what comes into force when the solver is out of time."""

from dataclasses import replace
from functools import partial

import pytest

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.plan.plan import PlanRequest
from ds_adacc.plan.solve import Forgiven, smallest_bound, solve
from ds_adacc.planner.solution import evaluate_uniform

CONFIG = load({"adacc": {"codecs": "none"}})


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


def test_a_search_for_a_bound_shares_its_seconds_and_ends_at_the_largest_valid_bound(monkeypatch):
    """Only without a bound every live set fits."""
    searched = []

    def too_small(problem, budget, *, max_seconds):
        searched.append((problem.max_gradient_error, max_seconds))
        if problem.max_gradient_error is not None:
            raise planner.InfeasibleBudget(budget, 2 * budget)

    monkeypatch.setattr(planner, "solve_in_process", too_small)
    types = {name: chain(name, 8) for name in "abcd"}
    assert smallest_bound(PlanRequest(types, [frozenset(name) for name in types], {}, 0.09), 100, 8.0) is None
    assert {seconds for _, seconds in searched} == {0.5}
    assert max(bound for bound, _ in searched[4:]) == pytest.approx(0.9e9)


def chain(name, first):
    """A block whose input takes `first` bytes. One operator makes 8 bytes of it, another 64 of these."""
    values = (
        planner.Value("x", "block_input", first, None, True),
        planner.Value("y", "other", 8, 0, True),
        planner.Value("z", "other", 64, 1, True),
    )
    ops = planner.Op("f", (0,), (1,), True), planner.Op("g", (1,), (2,), True)
    events = planner.Event("late", (2,), 0), planner.Event("early", (1,), 0)
    profile = planner.Profile(planner.BlockGraph(values, ops, events), (1.0, 1.0), ((), (), ()))
    return planner.BlockType(name, profile, count=2)


def busy(problem, *_, max_seconds):
    raise planner.NoSolutionInTime("the machine is busy")


@pytest.fixture
def no_solver(monkeypatch):
    monkeypatch.setattr(planner, "solve_in_process", busy)
    monkeypatch.setattr(planner, "least_peak_in_process", lambda problem, max_seconds: planner.leanest(problem))


def peak(block_type, policy):
    return evaluate_uniform(planner.Problem((block_type,)), [policy]).peak


@pytest.mark.usefixtures("no_solver")
def test_a_new_block_type_takes_the_leanest_policies_known_while_others_are_in_force():
    """The policies of the others stay."""
    old, new = chain("old", 8), chain("new", 8)
    in_force = {"old": (planner.retain_policy(old.profile),) * old.blocks}
    request = PlanRequest({"old": old, "new": new}, [frozenset(("old",)), frozenset(("new",))])
    solved = partial(solve, request, 1, CONFIG, in_force)
    group, _ = solved(Forgiven.ALL)
    assert [each.name for each in group.block_types] == ["new"] and group.shortfall
    assert group.solution.peak == planner.leanest(group.problem).peak < peak(new, planner.retain_policy(new.profile))
    with pytest.raises(planner.NoSolutionInTime):
        solved(Forgiven.NONE)


@pytest.mark.usefixtures("no_solver")
def test_policies_in_force_that_keep_the_budget_are_no_shortfall():
    block_type = chain("a", 8)
    lean = planner.recompute_policy(block_type.profile)
    budget = peak(block_type, lean)
    in_force = {"a": (lean,) * block_type.blocks}
    request = PlanRequest({"a": block_type}, [frozenset("a")])
    (group,) = solve(request, budget, CONFIG, in_force, Forgiven.OUT_OF_TIME)
    assert group.solution.peak == budget and group.solution.fallback.endswith("the machine is busy")
    assert not group.shortfall


def test_where_no_plan_fits_new_block_types_take_the_smallest_peak_found():
    """To recompute everything takes more: that needs the large input."""
    new = chain("new", 1000)
    request = PlanRequest({"new": new}, [frozenset(("new",))])
    with pytest.raises(planner.InfeasibleBudget) as refusal:
        solve(request, 1, CONFIG, {}, Forgiven.NONE)
    (group,) = solve(request, 1, CONFIG, {}, Forgiven.ALL)
    assert group.solution.peak == refusal.value.smallest < peak(new, planner.recompute_policy(new.profile))
    assert group.shortfall == str(planner.InfeasibleBudget(1, refusal.value.smallest, refusal.value.proven))


@pytest.mark.parametrize("is_busy", (False, True))
def test_where_no_plan_fits_beside_a_new_block_type_the_others_keep_their_policies(is_busy, request):
    """They run without the new one too, and fit then."""
    if is_busy:
        request.getfixturevalue("no_solver")
    old, new = chain("old", 8), chain("new", 1000)
    kept = (planner.retain_policy(old.profile),) * old.blocks
    together = PlanRequest({"old": old, "new": new}, [frozenset(("old", "new"))])
    (group,) = solve(together, 1, CONFIG, {"old": kept}, Forgiven.ALL)
    chosen = dict(zip((each.name for each in group.block_types), group.solution.policies, strict=True))
    assert chosen["old"] == kept
    assert set(chosen["new"]) == {planner.leanest(planner.Problem((new,))).policies[0][0]}
    assert chosen["new"][0] != planner.recompute_policy(new.profile)


def test_a_new_group_that_simple_rules_do_not_fit_takes_the_smallest_peak_found(monkeypatch):
    """An error may name that peak as the smallest budget: who enters it gets a plan that keeps it."""
    monkeypatch.setattr(planner, "solve_in_process", busy)
    monkeypatch.setattr(planner, "leanest", lambda problem: planner.everywhere(planner.retain_policy, problem))
    block_type = chain("a", 100)
    least = planner.least_peak_in_process(planner.Problem((block_type,)), max_seconds=5.0).peak
    assert least < peak(block_type, planner.retain_policy(block_type.profile))
    (group,) = solve(PlanRequest({"a": block_type}, [frozenset("a")]), least, CONFIG, {}, Forgiven.OUT_OF_TIME)
    assert group.solution.peak == least and not group.shortfall


def test_policies_in_force_lend_to_blocks_that_replay_something_now():
    """They were found when the budget allowed all blocks to retain everything: then none needs what is lent."""
    block_type = chain("a", 8)
    *earlier, last = block_type.profile.graph.events
    values = replace(block_type.profile.graph.values[0], lent=True), *block_type.profile.graph.values[1:]
    graph = replace(block_type.profile.graph, values=values, events=(*earlier, replace(last, values=(1, 0))))
    block_type = replace(block_type, profile=replace(block_type.profile, graph=graph))
    in_force = {"a": (planner.no_checkpointing(block_type.profile),) * 2}
    request = PlanRequest({"a": block_type}, [frozenset("a")])
    (group,) = solve(request, request.peak_without(), CONFIG, in_force, Forgiven.NONE)
    assert group.solution.policies == (in_force["a"],)
    (group,) = solve(request, request.peak_without() - 1, CONFIG, in_force, Forgiven.NONE)
    assert all(policy.stores[0] == "retain" for policy in group.solution.policies[0])


def test_policies_in_force_do_not_stay_if_backward_asks_for_more_now():
    """As of an input that another block saves: that was not known when the policies were found."""
    before = chain("a", 8)
    in_force = {"a": (planner.no_checkpointing(before.profile),) * 2}
    *earlier, last = before.profile.graph.events
    graph = replace(before.profile.graph, events=(*earlier, replace(last, values=(1, 0))))
    now = replace(before, profile=replace(before.profile, graph=graph))
    request = PlanRequest({"a": now}, [frozenset("a")])
    for forgiven, budget in ((Forgiven.NONE, request.peak_without()), (Forgiven.ALL, 1)):
        (group,) = solve(request, budget, CONFIG, in_force, forgiven)
        assert all(policy.stores[0] == "retain" for policy in group.solution.policies[0])
