"""A mix of points by a rule: examples worked out by hand, and what each mix of random ones keeps."""

import itertools
import sys

import pytest
from blocks import packable, replayable
from hypothesis import given
from hypothesis import strategies as st
from random_blocks import examples, microseconds, profiles

from ds_adacc.planner import (
    BlockGraph,
    BlockType,
    CodecCost,
    Event,
    NoSolutionInTime,
    Op,
    Policy,
    Problem,
    Profile,
    Value,
    added_seconds,
    everywhere,
    frontier,
    peak_bytes,
    retain_policy,
    solve_per_block,
)
from ds_adacc.planner.mix_points import mix_points
from ds_adacc.planner.solve_uniform import solve_uniform
from ds_adacc.planner.without_solver import without_solver

MODULE = sys.modules["ds_adacc.planner.solve_per_block"]
KEEP, PACK = Policy(("retain",)), Policy(("packed",))


def frontiers(problem):
    return [frontier(each.profile, max_seconds=60, blocks=each.blocks) for each in problem.block_types]


def mixed(problem, budget):
    return mix_points(problem, frontiers(problem), budget)


def test_what_no_price_fills_single_blocks_do():
    """At a price all blocks keep their 8 bytes or all pack them. 64 - 6 n + 8 <= 40 for six that pack."""
    solution = mixed(Problem((packable("a", 8),)), 40)
    assert (solution.policies[0].count(KEEP), solution.policies[0].count(PACK)) == (2, 6)
    assert (microseconds(solution.added_seconds), solution.peak, solution.fallback) == (6, 36, "")
    assert not solution.proven_optimal


def test_in_a_known_order_the_last_block_holds_more_than_the_others():
    """A block holds 8 bytes or 2, and takes 4 besides in backward; one that holds 2 takes the 8, too. So the third one
    fits into 4 + 8 + 4 if it holds 8, and the second into 2 + 2 + 8 + 4.
    """
    values = Value("x", "", 2, None, True), Value("y", "", 8, 0, True)
    graph = BlockGraph(values, (Op("op", (0,), (1,), True),), (Event("y", (1,), 4),))
    problem = Problem((BlockType("a", Profile(graph, (1e-6,), ((), ())), 3),), ("a",) * 3)
    kept, replayed = Policy((None, "retain")), Policy(("retain", None))
    assert {point.policy for point in frontiers(problem)[0]} == {kept, replayed}
    assert mixed(problem, 16).policies == ((replayed, replayed, kept),)
    assert mixed(problem, 16).peak == 16
    assert mixed(problem, 15) is None


def test_the_first_block_needs_no_room_for_what_comes_back_from_the_host():
    """Nothing comes back beside its 24 bytes of gradients. Beside any other block, another one's 8 bytes may."""
    large = BlockGraph((Value("x", "", 0, None, True),), (), (Event("x", (0,), 24),))
    small = BlockGraph((Value("y", "", 8, 0, True),), (Op("op", (), (0,), False),), (Event("y", (0,), 0),))
    offload = CodecCost.offload(8, 1e-6, 1e-6)
    types = BlockType("large", Profile(large, (), ((),)), 1), BlockType("a", Profile(small, (1e-6,), ((offload,),)), 4)
    problem = Problem(types, ("large", *"aaaa"))
    solution = mixed(problem, 24)
    assert solution.peak == 24
    assert any("offload" in policy.stores for policy in solution.policies[1])


def test_a_price_finds_what_is_not_found_block_by_block():
    """Blocks that retain the 8 bytes and rebuild the 10 fit into 8 + 8 + 10. Block by block, another 8 count: if the
    first block retained the 10, a cache would hold its 8 beside the second one.
    """
    values = Value("x", "", 8, 0, True, cached=True), Value("y", "", 10, 1, True)
    ops = Op("cast", (), (0,), False), Op("op", (0,), (1,), True)
    profile = Profile(BlockGraph(values, ops, (Event("y", (1,), 0),)), (1e-6, 1e-6), ((), ()))
    problem = Problem((BlockType("a", profile, 2),), ("a", "a"))
    assert {(point.simulation.held, point.simulation.cached) for point in frontiers(problem)[0]} == {(10, 8), (8, 0)}
    assert mixed(problem, 26).peak == 26
    assert mixed(problem, 25) is None


@st.composite
def in_order(draw):
    """Two block types of up to two blocks in some order."""
    random = profiles(st.integers(0, 40), may_keep=False)
    types = tuple(BlockType(name, draw(random), draw(st.integers(1, 2))) for name in "ab")
    return Problem(types, tuple(draw(st.permutations([each.name for each in types for _ in range(each.blocks)]))))


@examples(25)
@given(problem=in_order(), share=st.floats(0, 1))
def test_in_a_known_order_no_mix_is_quicker(problem, share):
    of_types = frontiers(problem)
    choices = [
        itertools.product([each.policy for each in points], repeat=block_type.blocks)
        for block_type, points in zip_types(problem, of_types)
    ]
    mixes = [(peak_bytes(problem, mix), added_seconds(problem, mix)) for mix in itertools.product(*map(list, choices))]
    budget = min(mixes)[0] + round(share * (max(mixes)[0] - min(mixes)[0]))
    solution = mix_points(problem, of_types, budget)
    assert solution.added_seconds == pytest.approx(min(seconds for peak, seconds in mixes if peak <= budget))


def test_blocks_that_save_more_bytes_a_second_come_first():
    """A call of "a" saves 6 bytes in a microsecond, one of "r" 4. No mix of the 32 is quicker in any budget."""
    problem = Problem((packable("a", 3), replayable(2)))
    of_types = frontiers(problem)
    choices = [itertools.product([each.policy for each in points], repeat=3 - n) for n, points in enumerate(of_types)]
    mixes = [(peak_bytes(problem, mix), added_seconds(problem, mix)) for mix in itertools.product(*map(list, choices))]
    for budget in range(min(mixes)[0], max(mixes)[0] + 1):
        best = min(seconds for peak, seconds in mixes if peak <= budget)
        assert mix_points(problem, of_types, budget).added_seconds == best


@pytest.mark.parametrize(("budget", "packs"), [(64 + 8, 0), (8 * 2 + 8, 8)])
def test_the_ends_of_the_frontier(budget, packs):
    solution = mixed(Problem((packable("a", 8),)), budget)
    assert solution.policies[0].count(PACK) == packs


def test_none_if_the_leanest_points_do_not_fit():
    assert mixed(Problem((packable("a", 8),)), 8 * 2 + 8 - 1) is None


@st.composite
def orders(draw):
    """Two block types of up to three blocks, in some order or in none."""
    has_order = draw(st.booleans())
    random = profiles(st.integers(0, 40), may_keep=not has_order)
    types = tuple(BlockType(name, draw(random), draw(st.integers(1, 3))) for name in "ab")
    names = [each.name for each in types for _ in range(each.blocks)]
    return Problem(types, tuple(draw(st.permutations(names))) if has_order else ())


@examples(25)
@given(problem=orders(), share=st.floats(0, 1))
def test_it_fits_and_no_block_could_take_a_quicker_point(problem, share):
    of_types = frontiers(problem)
    least = peak_bytes(problem, [[points[-1].policy] * each.blocks for each, points in zip_types(problem, of_types)])
    most = peak_bytes(problem, [[points[0].policy] * each.blocks for each, points in zip_types(problem, of_types)])
    budget = least + round(share * max(most - least, 0))
    solution = mix_points(problem, of_types, budget)
    assert solution.peak == peak_bytes(problem, solution.policies) <= budget
    assert solution == mix_points(problem, of_types, budget)
    for place, (block_type, points) in enumerate(zip_types(problem, of_types)):
        seconds = {point.policy: point.simulation.seconds for point in points}
        for block in range(block_type.blocks):
            for policy in seconds:
                others = [list(of_type) for of_type in solution.policies]
                if seconds[policy] < seconds[others[place][block]]:
                    others[place][block] = policy
                    assert peak_bytes(problem, others) > budget


def zip_types(problem, of_types):
    return list(zip(problem.block_types, of_types, strict=True))


def late(*_, **__):
    raise NoSolutionInTime("late")


@pytest.fixture
def late_mix(monkeypatch):
    """The integer program finds no mix in time."""
    monkeypatch.setattr(MODULE.PerBlockModel, "minimise_seconds", late)


def test_the_points_are_mixed_by_the_rule_where_the_program_finds_no_mix_in_time(gpt, late_mix, monkeypatch):
    problem = Problem((gpt,), ("gpt",) * gpt.count)
    budget = everywhere(retain_policy, problem).peak // 2
    rules = without_solver(problem, budget, "late")
    monkeypatch.setattr(MODULE, "solve_uniform", late)
    solution = solve_per_block(problem, budget, max_seconds=60)
    assert solution.fallback == "the solver found no policy in 60 seconds"
    assert solution.peak <= budget and solution.added_seconds < rules.added_seconds


def test_one_policy_for_all_gives_way_to_a_quicker_mix(gpt, late_mix):
    problem = Problem((gpt,), ("gpt",) * gpt.count)
    budget = everywhere(retain_policy, problem).peak // 2
    single = solve_uniform(problem, budget, max_seconds=60)
    solution = solve_per_block(problem, budget, max_seconds=60)
    assert solution.added_seconds < single.added_seconds
    assert (solution.fallback, solution.proven_optimal, solution.peak <= budget) == ("", False, True)
