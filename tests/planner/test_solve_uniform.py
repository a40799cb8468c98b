"""The solver's promises, on blocks larger than brute force can take."""

import pickle
import random
import sys

import pytest
from blocks import smallest_budget

from ds_adacc.planner import (
    BlockGraph,
    BlockType,
    CodecCost,
    Event,
    InfeasibleBudget,
    NoSolutionInTime,
    Op,
    Problem,
    Profile,
    Value,
    everywhere,
    greedy,
    peak_bytes,
    retain_policy,
    solve_uniform,
)
from ds_adacc.planner.solve_uniform import least_peak

MIB = 2**20


@pytest.fixture
def problem(gpt):
    return Problem((gpt,))


def spread(problem, points):
    """Budgets from the smallest feasible one to that of retaining everything."""
    smallest = smallest_budget(problem)
    largest = everywhere(retain_policy, problem).peak
    return [smallest + (largest - smallest) * i // (points - 1) for i in range(points)]


def test_more_budget_never_costs_time(problem):
    solutions = [solve_uniform(problem, budget, max_seconds=60) for budget in spread(problem, 10)]
    added = [solution.added_seconds for solution in solutions]
    assert added == sorted(added, reverse=True)
    assert added[0] > 0 == added[-1]


def test_same_input_same_policies(problem):
    for budget in spread(problem, 4):
        first = solve_uniform(problem, budget, max_seconds=60)
        for _ in range(2):
            assert solve_uniform(problem, budget, max_seconds=60).policies == first.policies


def test_the_smallest_budget_leaves_the_fastest_of_what_rounds_to_it():
    """16 MiB are 2^17 granules of 128 bytes: both codecs take as many of them."""
    graph = BlockGraph((Value("a", "", 16 * MIB, None, True),), (), (Event("a", (0,), 0),))
    slow, fast = (CodecCost(n, 2 * MIB + b, s, s, 0.1, 0) for n, b, s in (("slow", 1, 1.0), ("fast", 99, 0.1)))
    block_type = BlockType("rounded", Profile(graph, (), ((slow, fast),)), 4)
    smallest = smallest_budget(Problem((block_type,)))
    solution = solve_uniform(Problem((block_type,)), smallest, max_seconds=60)
    assert solution.policies[0][0].stores == ("fast",)
    assert solution.proven_optimal
    assert solution.peak <= smallest


def test_a_smallest_budget_found_in_haste_is_not_called_the_smallest(problem, monkeypatch):
    program = sys.modules["ds_adacc.planner.solve_uniform"].UniformModel  # the function hides its module in the package
    search = program.minimise_peak
    monkeypatch.setattr(program, "minimise_peak", lambda *given: search(*given) and False)
    with pytest.raises(InfeasibleBudget, match="the smallest found in the time allowed is") as caught:
        solve_uniform(problem, 1, max_seconds=60)
    assert not caught.value.proven
    assert not pickle.loads(pickle.dumps(caught.value)).proven


def test_retains_everything_where_that_fits(problem):
    plain = everywhere(retain_policy, problem)
    solution = solve_uniform(problem, plain.peak, max_seconds=1e-9)
    assert (solution.policies, solution.added_seconds) == (plain.policies, 0)
    assert solution.proven_optimal


def test_out_of_time(problem):
    with pytest.raises(NoSolutionInTime, match="the solver found no policy in"):
        solve_uniform(problem, smallest_budget(problem), max_seconds=1e-9)
    with pytest.raises(NoSolutionInTime, match="the solver found no policy in"):
        least_peak(problem, 1e-9)


def test_what_always_fits_and_is_called_infeasible_was_not_found_in_time(problem, monkeypatch):
    monkeypatch.setattr(sys.modules["ds_adacc.planner.solve_uniform"], "optimise", lambda *_: None)
    with pytest.raises(NoSolutionInTime, match="the solver found no policy, though there is one"):
        least_peak(problem, 60)
    with pytest.raises(InfeasibleBudget, match="the smallest found in the time allowed is"):
        solve_uniform(problem, 1, max_seconds=60)


def tied(codecs):
    """Four calls with two equal values each, which may be compressed at the same price by any of `codecs`."""
    values = tuple(Value(name, "", MIB, None, True) for name in "ab")
    graph = BlockGraph(values, (), (Event("ab", (0, 1), 0),))
    return BlockType("tied", Profile(graph, (), (codecs, codecs)), 4)


def test_among_equally_quick_the_smaller_error_wins():
    coarse = CodecCost("coarse", MIB // 4, 1e-6, 1e-6, 0.2, 0)
    fine = CodecCost("fine", 3 * MIB // 8, 1e-6, 1e-6, 0.01, 0)
    solution = solve_uniform(Problem((tied((coarse, fine)),)), 5 * MIB, max_seconds=60)
    assert solution.policies[0][0].stores == ("fine", "fine")
    assert solution.error == pytest.approx(4 * 2 * 0.01 * MIB)


def test_among_equal_errors_fewer_bytes_held_win():
    wide = CodecCost("wide", MIB // 2, 1e-6, 1e-6, 0.01, 0)
    tight = CodecCost("tight", MIB // 4, 1e-6, 1e-6, 0.01, 0)
    solution = solve_uniform(Problem((tied((wide, tight)),)), 7 * MIB, max_seconds=60)
    assert sorted(solution.policies[0][0].stores) == ["retain", "tight"]


def test_a_free_replay_that_serves_nothing_is_not_chosen():
    values = (Value("x", "", 4 * MIB, None, True), Value("y", "", MIB, 0, True), Value("z", "", MIB, 1, True))
    ops = (Op("first", (0,), (1,), True), Op("second", (1,), (2,), True))
    graph = BlockGraph(values, ops, (Event("y", (1,), 0), Event("x", (0,), 0)))
    block_type = BlockType("free", Profile(graph, (0.0, 0.0), ((), (), ())), 2)
    # forward makes z all the same: 4 + 6 MiB where one call holds x alone, 5 + 6 where it holds y too
    solution = solve_uniform(Problem((block_type,)), 10 * MIB, max_seconds=60)
    assert solution.policies[0][0].stores == ("retain", None, None)
    assert graph.replayed(solution.policies[0][0].stores) == (0,)


def test_nothing_to_choose(capfd):
    block_type = BlockType("empty", Profile(BlockGraph((), (), (Event("e", (), 8),)), (), ()), 3)
    assert smallest_budget(Problem((block_type,))) == 8
    assert solve_uniform(Problem((block_type,)), 8, max_seconds=60).policies[0][0].stores == ()
    with pytest.raises(InfeasibleBudget):
        solve_uniform(Problem((block_type,)), 7, max_seconds=60)
    assert capfd.readouterr() == ("", "")


def test_solver_is_silent(problem, capfd):
    solve_uniform(problem, spread(problem, 3)[1], max_seconds=60)
    assert capfd.readouterr() == ("", "")


def chain(length):
    """So many values, each made from the one before and now and then a little earlier one; two codecs for each."""
    draw = random.Random(0)
    values, ops, codecs = [Value("v0", "block input", 4096, None, True)], [], [()]
    for index in range(length - 1):
        inputs = sorted({index, max(0, index - draw.randint(1, 6))}) if draw.random() < 0.3 else [index]
        ops.append(Op(f"op{index}", tuple(inputs), (index + 1,), draw.random() < 0.95))
        nbytes = draw.choice([1, 2, 4, 8]) * 4096
        values.append(Value(f"v{index + 1}", "", nbytes, index, True))
        int4, int8 = (nbytes * seconds * draw.uniform(0.6, 1.4) for seconds in (2e-10, 1.3e-10))
        codecs.append(
            (CodecCost("int4", nbytes // 4, int4, int4, 0.1, 0), CodecCost("int8", nbytes // 2, int8, int8, 0.01, 0))
        )
    events = (Event(f"e{index}", (index,), 4096) for index in reversed(range(length)))
    graph = BlockGraph(tuple(values), tuple(ops), tuple(events))
    return Profile(graph, tuple(draw.uniform(1e-6, 2e-5) for _ in ops), tuple(codecs))


def test_two_thousand_values():
    problem = Problem((BlockType("chain", chain(2000), 1),))
    budget = everywhere(retain_policy, problem).peak // 2
    solution, quick = solve_uniform(problem, budget, max_seconds=60), greedy(problem, budget)
    assert solution.peak == peak_bytes(problem, solution.policies) <= budget
    assert set(solution.policies[0][0].stores) == {"retain", "int4", "int8", None}
    assert 0 < solution.added_seconds <= quick.added_seconds
