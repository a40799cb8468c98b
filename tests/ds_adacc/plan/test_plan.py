"""Which block types share the budget, and what becomes of those that do not fit."""

from dataclasses import replace

import pytest

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.plan.live_sets import components, maximal
from ds_adacc.plan.plan import PlanRequest
from ds_adacc.plan.solve import Forgiven, solve

MIB = 1 << 20


def sets(*names):
    return [frozenset(each) for each in names]


@pytest.mark.parametrize(
    ("live_sets", "expected"),
    [
        ([], []),
        (["ba", "c"], ["ab", "c"]),
        (["ab", "cd", "bc", "e"], ["abcd", "e"]),
        (["a", "a"], ["a"]),
    ],
)
def test_sets_that_overlap_hang_together(live_sets, expected):
    assert components(sets(*live_sets)) == sets(*expected)


def test_sets_within_others_say_nothing():
    assert maximal(sets("c", "a", "ab", "", "ab", "bc")) == tuple(sets("ab", "bc"))


def block_type(name, mebibytes):
    """Four calls of three values of this size in a row, each recomputable from the one before, all saved."""
    size = mebibytes * MIB
    values = tuple(planner.Value(f"x{i}", "other", size, i - 1 if i else None, True) for i in range(3))
    ops = tuple(planner.Op(f"op{i}", (i,), (i + 1,), True) for i in range(2))
    events = tuple(planner.Event(f"e{i}", (i,), 0) for i in range(2, -1, -1))
    graph = planner.BlockGraph(values, ops, events)
    return planner.BlockType(name, planner.Profile(graph, (0.001, 0.001), ((), (), ())), 4)


def decided(sizes, live_sets, budget, settled=(), forgiven=Forgiven.NONE):
    block_types = {name: block_type(name, size) for name, size in sizes.items()}
    config = load({"adacc": {"codecs": "none", "solver": {"max_seconds": 10.0}}})
    return solve(PlanRequest(block_types, sets(*live_sets)), budget * MIB, config, dict(settled), forgiven)


def test_kinds_that_never_run_together_have_the_whole_budget_each():
    apart = decided({"a": 1, "b": 1}, ["a", "b"], 12)
    assert [group.solution.added_seconds for group in apart] == [0, 0]
    (both,) = decided({"a": 1, "b": 1}, ["ab"], 12)
    assert both.solution.added_seconds > 0
    assert both.solution.peak <= 12 * MIB


def test_the_peak_without_checkpointing_is_of_the_set_that_takes_the_most():
    block_types = {name: block_type(name, size) for name, size in {"a": 1, "b": 3, "c": 1}.items()}
    assert PlanRequest(block_types, sets("a", "b")).peak_without() == 36 * MIB
    assert PlanRequest(block_types, sets("ac", "b")).peak_without() == 36 * MIB
    assert PlanRequest(block_types, sets("ab", "ac")).peak_without() == 48 * MIB


def test_blocks_whose_graph_is_kept_have_no_order():
    block_types = {name: block_type(name, 1) for name in "ab"}
    request = PlanRequest(block_types, sets("ab"), {frozenset("ab"): tuple("abababab")})
    assert request.problem("ab").order == tuple("abababab")
    profile = block_types["b"].profile
    block_types["b"] = replace(block_types["b"], profile=replace(profile, graph=profile.graph.kept))
    assert request.problem("ab").order == ()


def test_the_error_names_what_all_groups_would_fit():
    with pytest.raises(planner.InfeasibleBudget) as error:
        decided({"a": 1, "b": 3}, ["a", "b"], 1)
    smallest = error.value.smallest // MIB
    assert max(group.solution.peak for group in decided({"a": 1, "b": 3}, ["a", "b"], smallest)) == smallest * MIB


def test_where_a_group_does_not_fit_what_was_settled_stays_and_the_rest_is_recomputed():
    retain = planner.Policy(("retain", "retain", "retain"))
    small, large = decided(
        {"a": 1, "b": 1, "c": 9}, ["a", "bc"], 12, {"a": (retain,) * 4, "b": (retain,) * 4}, Forgiven.ALL
    )
    assert (small.solution.added_seconds, small.shortfall) == (0, "")
    assert large.solution.policies == ((retain,) * 4, (planner.recompute_policy(block_type("c", 9).profile),) * 4)
    assert large.solution.peak > 12 * MIB
    assert "too small" in large.shortfall


def test_where_all_are_settled_and_nothing_fits_what_takes_least_comes_into_force():
    retain = planner.Policy(("retain", "retain", "retain"))
    (group,) = decided({"a": 9}, ["a"], 12, {"a": (retain,) * 4}, Forgiven.ALL)
    with pytest.raises(planner.InfeasibleBudget) as error:
        decided({"a": 9}, ["a"], 12)
    assert group.solution.peak == error.value.smallest
    assert "too small" in group.shortfall


def test_what_takes_least_stays_away_where_it_would_break_the_budget_for_more():
    drop, retain = planner.recompute_policy(block_type("a", 1).profile), planner.Policy(("retain",) * 3)
    settled = {"a": (drop,) * 4, "b": (drop,) * 4, "c": (retain,) * 4}
    (group,) = decided({"a": 1, "b": 1, "c": 9}, ["ab", "ac"], 12, settled, Forgiven.ALL)
    assert group.unfit(12 * MIB) == sets("ac")


def test_a_settled_policy_whose_codec_is_no_longer_on_offer_is_recomputed():
    gone = planner.Policy(("retain", "group", "retain"))
    (group,) = decided({"a": 9}, ["a"], 12, {"a": (gone,) * 4}, Forgiven.ALL)
    assert group.solution.policies == ((planner.recompute_policy(block_type("a", 9).profile),) * 4,)


def test_out_of_time_is_raised_unless_forgiven(monkeypatch):
    def late(*_, **__):
        raise planner.NoSolutionInTime("no policy was found in 1 seconds")

    monkeypatch.setattr(planner, "solve_in_process", late)
    with pytest.raises(planner.NoSolutionInTime):
        decided({"a": 1}, ["a"], 12)
    (group,) = decided({"a": 1}, ["a"], 12, forgiven=Forgiven.OUT_OF_TIME)
    assert group.solution.peak <= 12 * MIB and not group.shortfall
    assert group.solution.fallback == "no policy was found in 1 seconds"


def test_out_of_time_the_policies_of_the_smallest_peak_come_before_full_recomputation(monkeypatch):
    def late(*_, **__):
        raise planner.NoSolutionInTime("the search was cut short")

    monkeypatch.setattr(planner, "solve_in_process", late)
    plain = block_type("a", 8)
    cost = planner.CodecCost("group8", 2 * MIB, 0.001, 0.001, error=0.0, workspace_bytes=0, lossless=True)
    compressible = replace(plain, profile=replace(plain.profile, codecs=((cost,), (), ())))
    config = load({"adacc": {"codecs": "none", "solver": {"max_seconds": 10.0}}})
    request = PlanRequest({"a": compressible}, sets("a"))
    recomputed = (planner.recompute_policy(plain.profile),) * 4

    def policies(budget, in_force):
        (group,) = solve(request, budget * MIB, config, in_force, Forgiven.ALL)
        fits = group.solution.peak <= budget * MIB
        assert (group.solution.fallback if fits else group.shortfall).startswith("the search was cut short")
        assert bool(group.shortfall) != fits
        return group.solution.policies

    assert policies(40, {"a": ()}) != (recomputed,), "32 MiB of inputs alone, and the transients"
    assert {policy.stores[0] for policy in policies(40, {"a": ()})[0]} == {"group8"}
    assert policies(40, {"a": recomputed}) != (recomputed,)
    assert policies(100, {"a": recomputed}) == (recomputed,), "what fits stays"
    for in_force in ({"b": recomputed}, {}):
        assert {p.stores[0] for p in policies(40, in_force)[0]} == {"group8"}, "a new block type runs the leanest known"
