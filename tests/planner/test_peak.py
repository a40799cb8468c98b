"""The peak of a step, against steps walked by hand and block by block."""

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from random_blocks import SMALL, examples, points, profiles, walk

from ds_adacc.planner import (
    OFFLOAD,
    BlockGraph,
    BlockType,
    CodecCost,
    Event,
    Policy,
    Problem,
    Profile,
    Value,
    added_seconds,
    held_bytes,
    peak_bytes,
    simulate,
)

# on the `block` of conftest, as in test_simulate: what a call holds; its forward; its backward
KEEP = Policy(("retain", "retain", "retain", "retain", None, None))  # 210; 150 210 240 260; 245 210 180 101
PACK = Policy(("retain", None, None, "int4", None, None))  # 115; 150 232 222 242; 217 232 160 101
REPLAY = Policy(("retain", None, None, None, None, None))  # 100; 150 210 200 220; 245 210 160 101


def test_in_any_order_the_largest_transient_meets_all_that_is_held(block):
    problem = Problem((BlockType("few", block, 2), BlockType("many", block, 5)))
    policies = [[KEEP] * 2, [PACK] * 5]
    assert peak_bytes(problem, policies) == 2 * 210 + 5 * 115 + max(260 - 210, 242 - 115)
    assert added_seconds(problem, policies) == 2 * 0.5 + 5 * 8.5
    assert held_bytes(problem, policies) == (2 * 210, 5 * 115)


def test_in_a_known_order_a_block_finds_what_earlier_ones_hold(block):
    problem = Problem((BlockType("block", block, 3),), order=("block",) * 3)
    expected = {
        (REPLAY, KEEP, PACK): 100 + 210 + 242,  # in forward of the last block; in its backward 100 + 210 + 232
        (KEEP, PACK, REPLAY): 210 + 115 + 245,  # in backward; in forward 210 + 115 + 220
        (PACK, REPLAY, KEEP): 115 + 100 + 260,
    }
    for policies, peak in expected.items():
        assert peak_bytes(problem, [policies]) == peak
        assert peak_bytes(replace(problem, order=()), [policies]) == 210 + 115 + 100 + (245 - 100)


def test_the_peak_may_fall_at_an_earlier_block(block):
    problem = Problem(
        (BlockType("fat", block, 2), BlockType("lean", lean(20, Event("x", (0,), 1)), 1)), order=("fat", "fat", "lean")
    )
    # the last block: 2 * 100 + 21; the second: 100 + 245 in backward, 100 + 220 in forward
    assert peak_bytes(problem, [[REPLAY] * 2, [LEAN]]) == 345
    # 210 + 115 + 21; the second: 210 + 242 in forward, 210 + 232 in backward
    assert peak_bytes(problem, [[KEEP, PACK], [LEAN]]) == 452


def test_the_peak_may_fall_where_backward_begins():
    problem = Problem((BlockType("quiet", lean(20), 3),), order=("quiet",) * 3)
    assert peak_bytes(problem, [[LEAN] * 3]) == 60


def test_what_later_blocks_leave_is_there_in_all_but_the_last():
    """The gradient of what all are given: 7 bytes, once the last block has begun it."""
    profile = lean(20, Event("x", (0,), 30))
    profile = replace(profile, graph=replace(profile.graph, carried_bytes=7))
    for count, peak in ((1, 20 + 30), (2, 40 + 30), (9, 180 + 30)):
        problem = Problem((BlockType("given", profile, count),), order=("given",) * count)
        assert peak_bytes(problem, [[LEAN] * count]) == peak
        assert peak_bytes(replace(problem, order=()), [[LEAN] * count]) == peak + 7
    small, large = lean(20, Event("x", (0,), 30)), replace(profile, graph=replace(profile.graph, carried_bytes=70))
    problem = Problem((BlockType("given", large, 2), BlockType("small", small, 1)), order=("given", "given", "small"))
    assert peak_bytes(problem, [[LEAN] * 2, [LEAN]]) == 40 + 30 + 70


def test_what_caches_hold_adds_up_in_forward_and_is_gone_in_backward(block):
    values = tuple(replace(value, cached=value.name == "a") for value in block.graph.values)
    cached = replace(block, graph=replace(block.graph, values=values))  # under REPLAY 40; forward 150 210 240 260
    problem = Problem((BlockType("block", cached, 3),), order=("block",) * 3)
    for policies, peak in {
        (REPLAY, REPLAY, REPLAY): 2 * (100 + 40) + 260,  # in backward 2 * 100 + 245
        (KEEP, REPLAY, KEEP): 210 + (100 + 40) + 260,
        (KEEP, KEEP, REPLAY): 210 + 210 + 260,
    }.items():
        assert peak_bytes(problem, [policies]) == peak
    unordered = replace(problem, order=())
    # forward ends with 3 * (100 + 40), and needs 120 besides. (245 - 100 in backward)
    assert peak_bytes(unordered, [[REPLAY] * 3]) == 3 * (100 + 40) + (260 - 140)
    assert peak_bytes(unordered, [[KEEP] * 3]) == 3 * 210 + (260 - 210)
    # The calls of one block find one copy in the cache.
    twice = replace(problem, block_types=(BlockType("block", cached, 4, calls_per_block=2),), order=())
    assert peak_bytes(twice, [[REPLAY] * 2]) == 4 * 100 + 2 * 40 + (260 - 140)


def test_the_peak_may_fall_in_forward_of_the_last_block(block):
    """Backward takes 60 bytes at most, forward 260 in any case."""
    short = replace(block, graph=replace(block.graph, events=(Event("c", (3,), 0),)))
    keep, replay = Policy((None, None, None, "retain", None, None)), Policy(("retain",) + (None,) * 5)
    known = Problem((BlockType("short", short, 2),), order=("short",) * 2)
    for problem in (known, replace(known, order=())):
        assert peak_bytes(problem, [[keep] * 2]) == 60 + 220
        assert peak_bytes(problem, [[replay] * 2]) == 100 + 220


def test_what_is_offloaded_is_copied_beside_the_forward_of_the_block_after(block):
    """200 bytes of x, which also come back beside its backward; the block after that finds nothing of them."""
    away = CodecCost.offload(200, 1.0, 1.0)
    first = Profile(BlockGraph((Value("x", "", 200, None, True),), (), (Event("x", (0,), 0),)), (), ((away,),))
    problem = Problem((BlockType("first", first, 1), BlockType("block", block, 1)), order=("first", "block"))
    lone = Policy((OFFLOAD,))
    assert peak_bytes(problem, [[lone], [KEEP]]) == 200 + 260
    quiet = replace(block, graph=replace(block.graph, events=(Event("b", (2,), 0),)))
    problem = Problem((BlockType("first", first, 1), BlockType("block", quiet, 1)), order=("first", "block"))
    kept = Policy((None, None, "retain", None, None, None))
    assert peak_bytes(problem, [[lone], [kept]]) == 200 + 220
    problem = Problem((problem.block_types[0], BlockType("block", quiet, 2)), order=("first", "block", "block"))
    assert peak_bytes(problem, [[lone], [kept, kept]]) == max(200 + 220, 60 + 220)


def lean(nbytes, *events):
    """A block with an input alone, and no ops."""
    return Profile(BlockGraph((Value("x", "", nbytes, None, True),), (), events), (), ((),))


LEAN = Policy(("retain",))


def test_what_was_offloaded_comes_back_beside_the_block_after(block):
    transfer = CodecCost.offload(100, 1.0, 1.0)
    profile = replace(block, codecs=((transfer,), *block.codecs[1:]))
    away = Policy((OFFLOAD, "retain", "retain", "retain", None, None))  # 110 and 100 on the host; 245 ...
    problem = Problem((BlockType("block", profile, 2),), order=("block",) * 2)
    assert peak_bytes(problem, [(away, REPLAY)]) == 110 + 100 + 245
    assert peak_bytes(problem, [(REPLAY, away)]) == 100 + 260
    assert peak_bytes(replace(problem, order=()), [(REPLAY, away)]) == 210 + (260 - 110) + 100


def test_all_calls_of_a_block_count(block):
    problem = Problem((BlockType("a", block, 1), BlockType("b", block, 4, calls_per_block=2)))
    policies = [[KEEP], [PACK, REPLAY]]
    assert peak_bytes(problem, policies) == 210 + 2 * 115 + 2 * 100 + 145
    assert held_bytes(problem, policies) == (210, 2 * 115 + 2 * 100)
    assert added_seconds(problem, policies) == 0.5 + 2 * 8.5 + 2 * 3.5


@st.composite
def planned(draw):
    """Up to four blocks of one or two block types in a row, and a policy for each."""
    of_type = {name: draw(profiles(SMALL, ops=3, may_keep=False)) for name in draw(st.sampled_from(["a", "ab"]))}
    order = draw(st.permutations([*of_type, *draw(st.lists(st.sampled_from(sorted(of_type)), max_size=2))]))
    known = {name: [point.policy for point in points(profile)] for name, profile in of_type.items()}
    policies = [[draw(st.sampled_from(known[name])) for _ in range(order.count(name))] for name in of_type]
    block_types = tuple(BlockType(name, profile, order.count(name)) for name, profile in of_type.items())
    return Problem(block_types, order=tuple(order)), policies


def in_forward_order(problem, policies):
    """One call of each block."""
    waiting = {block_type.name: iter(chosen) for block_type, chosen in zip(problem.block_types, policies, strict=True)}
    profiles = {block_type.name: block_type.profile for block_type in problem.block_types}
    return [simulate(profiles[name], next(waiting[name])) for name in problem.order]


@examples(100)
@given(planned())
def test_the_peak_is_that_of_a_walk_through_forward_and_backward(plan):
    problem, policies = plan
    calls = in_forward_order(problem, policies)
    assert peak_bytes(problem, policies) == walk(calls)
    # not knowing the order, no order must take more
    unordered = peak_bytes(replace(problem, order=()), policies)
    walks = [walk(order) for order in itertools.permutations(calls)]
    assert max(walks) <= unordered
    if not any(call.fetched or call.carried for call in calls):
        assert max(walks) == unordered
