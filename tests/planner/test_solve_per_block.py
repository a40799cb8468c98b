"""A policy for each block, against examples worked out by hand and every assignment of small random ones."""

import functools
import itertools
import sys
import time
from dataclasses import replace

import pytest
from blocks import check_gradient_errors, packable, replayable, smallest_budget
from hypothesis import given
from hypothesis import strategies as st
from random_blocks import ERROR_BOUNDS, MICROSECOND, examples, microseconds, points, profiles, undominated, walk

from ds_adacc.planner import (
    OFFLOAD,
    BlockGraph,
    BlockType,
    CodecCost,
    Event,
    InfeasibleBudget,
    NoSolutionInTime,
    Op,
    Policy,
    Problem,
    Profile,
    Simulation,
    Value,
    everywhere,
    frontier,
    leanest,
    peak_bytes,
    recompute_policy,
    retain_policy,
    simulate,
    solve_per_block,
    solve_uniform,
)
from ds_adacc.planner.milp import GAP

TINY = st.integers(0, 5)  # so that no point of a frontier is left out
QUANTUM = 0.1  # microseconds

KEEP, PACK = Policy(("retain",)), Policy(("packed",))
KEEP_TWO, REPLAY = Policy(("retain", "retain")), Policy(("retain", None))


def test_packs_as_many_blocks_as_it_takes():
    problem = Problem((packable("a", 8),))
    # 64 - 6 n + 8 <= 40
    assert microseconds(solve_uniform(problem, 40, max_seconds=60).added_seconds) == 8
    solution = solve_per_block(problem, 40, max_seconds=60)
    assert sorted(solution.policies[0].count(policy) for policy in (KEEP, PACK)) == [2, 6]
    assert (microseconds(solution.added_seconds), solution.held, solution.peak) == (6, (28,), 36)
    assert solution.proven_optimal


def test_the_last_block_copies_nothing_to_the_host_that_its_backward_wants_at_once():
    """All may go there for no time at all, and then the solver would rather hold fewer bytes."""
    away = CodecCost.offload(100, MICROSECOND, MICROSECOND)
    graph = BlockGraph((Value("x", "", 100, None, True),), (), (Event("x", (0,), 0),))
    profile = Profile(graph, (), ((away,),), (MICROSECOND, MICROSECOND))
    problem = Problem((BlockType("a", profile, 6),), order=("a",) * 6)
    solution = solve_per_block(problem, 500, max_seconds=60)
    *others, last = (policy.stores[0] for policy in solution.policies[0])
    assert OFFLOAD in others and last == "retain"
    assert solution.peak <= 500 and solution.proven_optimal
    moved = [*solution.policies[0][:-1], Policy((OFFLOAD,))]
    assert peak_bytes(problem, [moved]) == solution.peak


def late(*_, **__):
    raise NoSolutionInTime("late")


def test_nothing_is_proven_by_frontiers_that_were_cut_short(monkeypatch):
    def slow(*args, max_seconds, **options):
        time.sleep(max_seconds)
        return frontier(*args, max_seconds=60, **options)

    monkeypatch.setattr(sys.modules["ds_adacc.planner.solve_per_block"], "frontier", slow)
    solution = solve_per_block(Problem((packable("a", 8),)), 40, max_seconds=1.0)
    assert microseconds(solution.added_seconds) == 6
    assert not solution.proven_optimal


def test_keeps_everything_where_that_fits():
    solution = solve_per_block(Problem((packable("a", 8),)), 64, max_seconds=1e-9)
    assert (solution.policies, solution.added_seconds, solution.proven_optimal) == (((KEEP,) * 8,), 0, True)


def test_all_calls_of_a_block_share_its_policy():
    # a block of two calls saves 12 bytes: 64 - 12 n + 8 <= 46
    solution = solve_per_block(Problem((packable("a", 8, calls_per_block=2),)), 46, max_seconds=60)
    assert (solution.policies[0].count(PACK), len(solution.policies[0])) == (3, 4)
    assert microseconds(solution.added_seconds) == 6
    alone = solve_per_block(Problem((packable("a", 8),)), 46, max_seconds=60)
    assert microseconds(alone.added_seconds) == 5


def test_in_a_known_order_blocks_with_larger_transients_come_first():
    problem = Problem((replayable(4),), order=("r",) * 4)
    expected = {
        28: [REPLAY, KEEP_TWO, KEEP_TWO, KEEP_TWO],  # 2 + 6 + 6 + 11 at the last
        25: [REPLAY, KEEP_TWO, KEEP_TWO, KEEP_TWO],
        21: [REPLAY, REPLAY, KEEP_TWO, KEEP_TWO],  # 2 + 2 + 6 + 11, and 2 + 16 at the second
        20: [REPLAY, REPLAY, REPLAY, KEEP_TWO],  # 2 + 2 + 2 + 11, and 2 + 2 + 16 at the third
    }
    for budget, policies in expected.items():
        assert solve_per_block(problem, budget, max_seconds=60).policies == (tuple(policies),)


def test_fits_where_no_one_policy_does_in_a_known_order():
    known, unknown = Problem((replayable(4),), order=("r",) * 4), Problem((replayable(4),))
    assert smallest_budget(known) == 22  # three that hold 2, and 16
    with pytest.raises(InfeasibleBudget, match="is 22 bytes"):
        solve_uniform(known, 20, max_seconds=60)
    assert solve_per_block(known, 20, max_seconds=60).peak == 20
    with pytest.raises(InfeasibleBudget, match="the smallest found in the time allowed is 20 bytes") as caught:
        solve_per_block(known, 19, max_seconds=60)
    assert (caught.value.budget, caught.value.smallest) == (19, 20)
    with pytest.raises(InfeasibleBudget, match="the smallest that fits is 22 bytes"):
        solve_per_block(unknown, 21, max_seconds=60)


def test_where_a_block_stands_among_other_kinds_matters():
    values = (Value("x", "", 8, None, True),)
    fixed = BlockType("f", Profile(BlockGraph(values, (), (Event("x", (0,), 0),)), (), ((),)), 1)
    block_types = (replayable(2), fixed)
    # 2 + 8 + 11 at the last, 16 at the first; were the last one replayed, 6 + 8 + 16 at that
    solution = solve_per_block(Problem(block_types, order=("r", "f", "r")), 23, max_seconds=60)
    assert solution.policies == ((REPLAY, KEEP_TWO), (KEEP,))
    assert (solution.peak, solution.held) == (21, (8, 8))
    with pytest.raises(InfeasibleBudget, match="is 24 bytes"):
        solve_per_block(Problem(block_types, order=("f", "r", "r")), 23, max_seconds=60)


def test_max_gradient_error():
    problem = Problem((packable("a", 8, error=0.2),), max_gradient_error=0.1)
    assert solve_per_block(problem, 64, max_seconds=60).policies == ((KEEP,) * 8,)
    with pytest.raises(InfeasibleBudget, match="is 64 bytes"):
        solve_per_block(problem, 63, max_seconds=60)
    assert solve_per_block(replace(problem, max_gradient_error=0.25), 63, max_seconds=60).policies[0].count(PACK) == 2


def test_one_block_has_one_policy(gpt):
    one = replace(gpt, count=1)
    full = everywhere(retain_policy, Problem((one,))).peak
    budget = (smallest_budget(Problem((one,))) + full) // 2
    single = solve_uniform(Problem((one,)), budget, max_seconds=60)
    assert single.added_seconds > 0
    for order in ((), ("gpt",)):
        mixed = solve_per_block(Problem((one,), order=order), budget, max_seconds=60)
        assert (mixed.policies, mixed.peak) == (single.policies, single.peak)


@pytest.fixture(scope="module")
def known():
    return functools.cache(lambda profile: frontier(profile, max_seconds=60))


@pytest.fixture
def frontiers_known(known, monkeypatch):
    """The frontier is the same for all budgets, block types and tests that have the profile, so it is made once."""
    module = sys.modules["ds_adacc.planner.solve_per_block"]
    monkeypatch.setattr(module, "frontier", lambda profile, **_: known(profile))


@pytest.mark.usefixtures("frontiers_known")
def test_never_slower_than_one_policy(gpt):
    problem = Problem((gpt,), order=("gpt",) * 12)
    full = everywhere(retain_policy, problem).peak
    faster = 0
    for percent in range(20, 100, 10):
        budget = full * percent // 100
        single, mixed = solve_uniform(problem, budget, max_seconds=60), solve_per_block(problem, budget, max_seconds=60)
        assert mixed.peak == peak_bytes(problem, mixed.policies) <= budget
        assert mixed.added_seconds <= single.added_seconds
        faster += mixed.added_seconds < 0.99 * single.added_seconds
    assert faster >= 6


def test_the_one_policy_is_not_called_the_best_mix_when_time_runs_out(gpt, monkeypatch):
    problem = Problem((gpt,), order=("gpt",) * 12)
    budget = everywhere(retain_policy, problem).peak // 2
    single = solve_uniform(problem, budget, max_seconds=60)
    assert single.proven_optimal
    monkeypatch.setattr(sys.modules["ds_adacc.planner.solve_per_block"], "frontier", late)
    found = solve_per_block(problem, budget, max_seconds=60)
    assert (found.policies, found.proven_optimal) == (single.policies, False)


def test_a_refusal_names_the_smallest_budget_that_is_known(gpt, monkeypatch):
    """The rules that stand in for a search that is cut short know less than the search for one policy did."""
    problem = Problem((gpt,), order=("gpt",) * 12)
    with pytest.raises(InfeasibleBudget) as of_one_policy:
        solve_uniform(problem, 1, max_seconds=60)
    rules = sys.modules["ds_adacc.planner.without_solver"]
    monkeypatch.setattr(rules, "_candidates", lambda problem: [everywhere(recompute_policy, problem)])
    monkeypatch.setattr(rules, "_MOST_TRIES", 0)
    monkeypatch.setattr(sys.modules["ds_adacc.planner.solve_per_block"], "least_peak", late)
    with pytest.raises(InfeasibleBudget) as refusal:
        solve_per_block(problem, 1, max_seconds=60)
    assert refusal.value.smallest == of_one_policy.value.smallest < leanest(problem).peak
    assert not refusal.value.proven


@st.composite
def few_blocks(draw, transfers=False):
    """Two to four blocks of one or two block types, in a known order or in any."""
    order = draw(st.sampled_from(["aa", "aaa", "aaaa", "ab", "abab", "aabb", "abba", "aab", "aba"]))
    names = sorted(set(order))
    how = draw(st.sampled_from(["order", "order", "any"]))
    calls = 1 if how == "order" else draw(st.sampled_from([1, 1, 2]))
    random = profiles(TINY, ops=3, transfers=transfers, may_keep=how == "any")
    block_types = tuple(BlockType(name, draw(random), calls * order.count(name), calls) for name in names)
    bound = draw(st.one_of(st.none(), ERROR_BOUNDS))
    return Problem(block_types, tuple(order) if how == "order" else (), bound)


def budgets(problem):
    """From what one policy can do to what needs none."""
    smallest, full = smallest_budget(problem), everywhere(retain_policy, problem).peak
    # One policy is planned for any order of the blocks. In their own order, retaining everything may take less.
    return sorted({smallest, max(smallest, (smallest + full) // 2)} - {full})


def runs_on_offer(problem, single):
    """Per block in forward order, its block type and what it may do: a point of the frontier or the one policy."""
    bound, of_type = problem.max_gradient_error, []
    for place, block_type in enumerate(problem.block_types):
        policies = {single.policies[place][0]}
        for with_cached in {False, block_type.profile.graph.has_cached}:
            limits = {"max_seconds": 60, "max_gradient_error": bound, "with_cached": with_cached}
            policies |= {point.policy for point in frontier(block_type.profile, **limits)}
        of_type.append([simulate(block_type.profile, policy) for policy in policies])
    layout = problem.rows or [(place, block_type.blocks) for place, block_type in enumerate(problem.block_types)]
    blocks = [(place, of_type[place]) for place, count in layout for _ in range(count)]
    if problem.order:
        # the last block may do anything
        place = blocks[-1][0]
        profile = problem.block_types[place].profile
        profile = replace(profile, graph=replace(profile.graph, carried_bytes=0))
        every = (point.simulation for point in points(profile, bound))
        best = undominated((run.held, max(run.forward), max(run.timeline), microseconds(run.seconds)) for run in every)
        last = [
            Simulation(held, (forward,), (backward,), seconds * MICROSECOND)
            for held, forward, backward, seconds in best
        ]
        blocks[-1] = (place, last)
    return blocks


def peak_of(problem, places, runs):
    """The peak of one run for each block."""
    if problem.order:
        return walk(runs)
    held = sum(problem.block_types[place].calls_per_block * run.held for place, run in zip(places, runs, strict=True))
    forward = sum(run.cached for run in runs) + max(max(run.forward) - run.held - run.cached for run in runs)
    return held + max(forward, *(run.transient for run in runs)) + max(run.fetched for run in runs)


def quickest(problem, single, budget):
    """The least microseconds of any assignment that fits."""
    places, choices = zip(*runs_on_offer(problem, single), strict=True)
    calls = [problem.block_types[place].calls_per_block for place in places]
    return min(
        sum(count * microseconds(run.seconds) for count, run in zip(calls, runs, strict=True))
        for runs in itertools.product(*choices)
        if peak_of(problem, places, runs) <= budget
    )


@examples(20)
@given(problem=few_blocks())
def test_equals_the_best_assignment_of_points(problem):
    for budget in budgets(problem):
        single, mixed = (planner(problem, budget, max_seconds=60) for planner in (solve_uniform, solve_per_block))
        assert mixed.peak == peak_bytes(problem, mixed.policies) <= budget
        assert mixed.added_seconds <= single.added_seconds
        best = quickest(problem, single, budget)
        assert best <= microseconds(mixed.added_seconds) <= best / (1 - GAP) + QUANTUM


@examples(10)
@given(problem=few_blocks(transfers=True))
def test_keeps_what_it_promises(problem):
    for budget in budgets(problem):
        single, mixed = (planner(problem, budget, max_seconds=60) for planner in (solve_uniform, solve_per_block))
        assert mixed.peak == peak_bytes(problem, mixed.policies) <= budget
        assert mixed.added_seconds <= single.added_seconds
        check_gradient_errors(problem, mixed)
    if smallest_budget(problem) == 0:
        return
    with pytest.raises(InfeasibleBudget) as caught:
        solve_per_block(problem, 0, max_seconds=60)
    assert caught.value.smallest <= smallest_budget(problem)
    assert solve_per_block(problem, caught.value.smallest, max_seconds=60).peak <= caught.value.smallest


@pytest.mark.parametrize("exact_values", [0, 60])
def test_where_forward_has_the_peak_what_caches_hold_is_kept_for_no_bytes(monkeypatch, exact_values):
    """The casts w and v are in the cache until forward ends. To recompute them would be cheap, and frees nothing."""
    monkeypatch.setattr(sys.modules["ds_adacc.planner.solve_per_block"], "EXACT_VALUES", exact_values)
    made = enumerate([("w", 10), ("v", 5), ("a", 10), ("b", 5)])
    values = tuple(Value(name, "", size, op, True, cached=name in "wv") for op, (name, size) in made)
    ops = tuple(Op(value.name, (), (op,), True, 0) for op, value in enumerate(values))
    graph = BlockGraph(values, ops, (Event("all", (0, 1, 2, 3), 0),))
    profile = Profile(graph, tuple(count * MICROSECOND for count in (1, 1, 8, 3)), ((),) * 4)
    problem = Problem((BlockType("a", profile, 4),), order=("a",) * 4)
    assert everywhere(retain_policy, problem).peak == 4 * 30
    # In the last block all is alive to the end of forward. Of the first three, two are without a and b for 30 bytes.
    for saved, added in {5: 3, 10: 2 * 3, 15: 3 * 3, 30: 2 * (8 + 3)}.items():
        assert microseconds(solve_per_block(problem, 120 - saved, max_seconds=60).added_seconds) == added


def test_where_the_solver_is_out_of_time_the_rules_are_asked_once(gpt, monkeypatch):
    module = sys.modules["ds_adacc.planner.solve_per_block"]
    asked = []

    def refused(*_, **__):
        raise InfeasibleBudget(1, 2, proven=False)

    def rules(problem, budget, why):
        asked.append(why)
        raise NoSolutionInTime(f"{why}. Simple rules find none")

    monkeypatch.setattr(module, "solve_uniform", refused)
    monkeypatch.setattr(module, "least_peak", late)
    monkeypatch.setattr(module, "without_solver", rules)
    with pytest.raises(NoSolutionInTime, match=r"^the solver found no policy in 60 seconds\. Simple rules find none$"):
        solve_per_block(Problem((gpt,), ("gpt",) * gpt.count), 1, max_seconds=60)
    assert asked == ["the solver found no policy in 60 seconds"]


@pytest.fixture
def four_types(gpt, frontiers_known):
    """Four block types with 64 values in all, and half of the peak without checkpointing."""
    names = ("a", "b", "c", "d")
    problem = Problem(tuple(replace(gpt, name=name, count=3) for name in names), tuple(name for name in names * 3))
    return problem, everywhere(retain_policy, problem).peak // 2


def test_with_many_values_the_points_of_the_frontiers_come_first(four_types, monkeypatch):
    problem, budget = four_types
    module = sys.modules["ds_adacc.planner.solve_per_block"]
    asked = []

    def searched(*given, **more):
        asked.append(more)
        return solve_uniform(*given, **more)

    monkeypatch.setattr(module, "solve_uniform", searched)
    solution = solve_per_block(problem, budget, max_seconds=60)
    assert not asked
    assert solution.peak == peak_bytes(problem, solution.policies) <= budget
    assert solution.added_seconds <= solve_uniform(problem, budget, max_seconds=60).added_seconds * (1 + GAP)
    unordered = replace(problem, order=())
    single, mixed = (planner(unordered, budget, max_seconds=60) for planner in (solve_uniform, solve_per_block))
    assert len(asked) == 1
    assert mixed.added_seconds <= single.added_seconds


def test_the_points_that_were_found_in_time_are_the_answer_where_one_policy_for_all_is_not_found(
    four_types, monkeypatch
):
    problem, budget = four_types
    unordered = replace(problem, order=())  # for blocks in an order one policy for all is not looked for
    monkeypatch.setattr(sys.modules["ds_adacc.planner.solve_per_block"], "solve_uniform", late)
    solution = solve_per_block(unordered, budget, max_seconds=60)
    assert (solution.fallback, solution.peak <= budget) == ("", True)


def test_a_budget_that_an_error_has_named_is_kept_though_the_search_for_the_least_time_finds_nothing(gpt, monkeypatch):
    module = sys.modules["ds_adacc.planner.solve_per_block"]
    problem = Problem((gpt,), ("gpt",) * gpt.count)
    with pytest.raises(InfeasibleBudget) as caught:
        solve_per_block(problem, 1, max_seconds=60)
    monkeypatch.setattr(module, "solve_uniform", late)
    monkeypatch.setattr(module, "without_solver", late)
    monkeypatch.setattr(module, "mix_points", late)
    found = solve_per_block(problem, caught.value.smallest, max_seconds=60)
    assert found.peak == peak_bytes(problem, found.policies) <= caught.value.smallest
    assert found.fallback == "the solver found no policy in 60 seconds"
    with pytest.raises(NoSolutionInTime, match="late"):
        solve_per_block(problem, caught.value.smallest // 2, max_seconds=60)
