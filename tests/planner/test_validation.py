"""What does not fit together is refused by name."""

from dataclasses import replace

import pytest

from ds_adacc.planner import (
    BlockGraph,
    BlockType,
    CodecCost,
    Event,
    Op,
    Policy,
    Problem,
    Profile,
    Value,
    frontier,
    peak_bytes,
    solve_in_process,
    solve_per_block,
    solve_uniform,
)
from ds_adacc.planner.solve_uniform import least_peak

X = Value("x", "block input", 4, None, True)
Y = Value("y", "", 4, 0, True)
DOUBLE = Op("double", (0,), (1,), True)
USE = Event("use", (1,), 0)


@pytest.mark.parametrize(
    ("values", "ops", "events", "message"),
    [
        ((X, replace(Y, nbytes=-4)), (DOUBLE,), (USE,), "nbytes of value 'y' is -4"),
        ((X, replace(Y, nbytes=4.0)), (DOUBLE,), (USE,), "nbytes of value 'y' is 4.0"),
        ((X, replace(Y, producer=3)), (DOUBLE,), (USE,), "op 'double' .* lists output 'y', whose producer is 3"),
        ((X, Y, replace(Y, name="z", producer=7)), (DOUBLE,), (USE,), "value 'z' has producer 7; valid are None and 0"),
        ((X, Y, replace(Y, name="z")), (DOUBLE,), (USE,), "value 'z' has producer 0 .'double'., which does not list"),
        ((X, Y), (replace(DOUBLE, outputs=(1, 1)),), (USE,), "lists output 'y'.*list it once"),
        ((X, Y), (replace(DOUBLE, workspace_bytes=-8),), (USE,), "workspace_bytes of op 'double' is -8"),
        ((X, Y), (replace(DOUBLE, inputs=(5,)),), (USE,), r"op 'double' refers to value 5; valid are 0\.\.1"),
        ((X, Y), (replace(DOUBLE, inputs=(1,)),), (USE,), "op 'double' .* reads value 'y', which op 0 makes"),
        ((X, Y), (DOUBLE,), (replace(USE, values=(2,)),), "event 'use' refers to value 2"),
        ((X, Y), (DOUBLE,), (replace(USE, values=(1, 1)),), "event 'use' lists values .1, 1.: each must appear once"),
        ((X, Y), (DOUBLE,), (replace(USE, gradient_bytes=-1),), "gradient_bytes of event 'use' is -1"),
        (
            (X, replace(Y, storable=False)),
            (replace(DOUBLE, replayable=False),),
            (USE,),
            "event 'use' needs value 'y', which is neither storable nor made by a replayable op",
        ),
        ((replace(X, storable=False), replace(Y, storable=False)), (DOUBLE,), (USE,), "needs value 'y'"),
    ],
)
def test_graph(values, ops, events, message):
    with pytest.raises(ValueError, match=message):
        BlockGraph(values, ops, events)


def test_forward_overhead_is_checked():
    with pytest.raises(ValueError, match="forward_overhead is -1; it must be a non-negative int"):
        BlockGraph((X, Y), (DOUBLE,), (USE,), -1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nbytes": -1}, "nbytes of codec 'int4' is -1"),
        ({"workspace_bytes": 0.5}, "workspace_bytes of codec 'int4' is 0.5"),
        ({"compress_seconds": float("nan")}, "compress_seconds of codec 'int4' is nan; it must be finite"),
        ({"decompress_seconds": float("inf")}, "decompress_seconds of codec 'int4' is inf"),
        ({"error": -0.1}, "error of codec 'int4' is -0.1"),
        ({"gradient_error": float("nan")}, "gradient_error of codec 'int4' is nan"),
        ({"codec": "retain"}, "a codec is named 'retain'"),
        ({"lossless": True}, "codec 'int4' is lossless, but has error = 0.1 and gradient_error = 0.0: both must be 0"),
    ],
)
def test_codec(change, message):
    with pytest.raises(ValueError, match=message):
        CodecCost(**{**vars(CodecCost("int4", 1, 1e-6, 1e-6, 0.1, 0)), **change})


@pytest.mark.parametrize(
    ("seconds", "codecs", "message"),
    [
        ((), ((), ()), "op_seconds has 0 entries; there are 1 ops"),
        ((1e-6,), ((),), "codecs has 1 entries; there are 2 values"),
        ((float("nan"),), ((), ()), "op_seconds of op 'double' is nan"),
        ((1e-6,), ((), (CodecCost("bits", 1, 0, 0, 0, 0),) * 2), "value 'y' is offered codecs .'bits', 'bits'."),
    ],
)
def test_profile(seconds, codecs, message):
    with pytest.raises(ValueError, match=message):
        Profile(BlockGraph((X, Y), (DOUBLE,), (USE,)), seconds, codecs)


@pytest.mark.parametrize(
    ("overlap_seconds", "message"),
    [((-1.0, 0.0), "overlap_seconds of forward is -1.0"), ((0.0, float("inf")), "overlap_seconds of backward is inf")],
)
def test_hiding_seconds(block, overlap_seconds, message):
    with pytest.raises(ValueError, match=message):
        replace(block, overlap_seconds=overlap_seconds)


def test_no_codec_for_what_cannot_be_stored():
    graph = BlockGraph((X, replace(Y, storable=False)), (DOUBLE,), (USE,))
    with pytest.raises(ValueError, match=r"value 'y' is offered codecs .'bits'., but is not storable"):
        Profile(graph, (0.0,), ((), (CodecCost("bits", 1, 0, 0, 0, 0),)))


@pytest.mark.parametrize(
    ("stores", "message"),
    [
        ((None,) * 5, "the policy has 5 stores; the graph has 6 values"),
        ((None, None, None, None, "retain", None), "value 'd' is stored as 'retain', but is not storable"),
        (("int4", None, None, None, None, None), "value 'x' is stored as 'int4'; on offer are .'retain'."),
        ((None, *("retain",) * 3, None, None), "event 'x' needs value 'x', which cannot be rebuilt: store it"),
    ],
)
def test_policy(block, stores, message):
    with pytest.raises(ValueError, match=message):
        Policy(stores).check(block)


def test_the_input_of_a_replay_must_be_at_hand():
    values = (X, Y, Value("z", "", 4, 1, True))
    ops = (replace(DOUBLE, replayable=False), Op("again", (1,), (2,), True))
    graph = BlockGraph(values, ops, (Event("use", (2,), 0),))
    with pytest.raises(ValueError, match="replayed op 'again' needs value 'y', which cannot be rebuilt"):
        Policy((None, None, None)).check(Profile(graph, (0.0, 0.0), ((), (), ())))


def test_kind(block):
    with pytest.raises(ValueError, match="count of block type 'gpt' is 0; leave the block type out"):
        BlockType("gpt", block, 0)
    with pytest.raises(ValueError, match="count of block type 'gpt' is -2"):
        BlockType("gpt", block, -2)


def test_calls_per_block(block):
    with pytest.raises(ValueError, match="calls_per_block of block type 'gpt' is 0; leave the block type out"):
        BlockType("gpt", block, 2, calls_per_block=0)
    with pytest.raises(ValueError, match="calls_per_block of 'gpt' is 3; it must divide its 4 calls"):
        BlockType("gpt", block, 4, calls_per_block=3)
    assert BlockType("gpt", block, 6, calls_per_block=3).blocks == 2


PLANNERS = (
    solve_uniform,
    solve_per_block,
    solve_in_process,
)


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize(
    ("budget", "max_seconds", "message"),
    [
        (-1, 1.0, "budget is -1; it must be a non-negative int"),
        (1e9, 1.0, "budget is 1000000000.0"),
        (100, 0.0, "max_seconds is 0.0; it must be finite and positive"),
        (100, float("inf"), "max_seconds is inf"),
    ],
)
def test_request(block, planner, budget, max_seconds, message):
    with pytest.raises(ValueError, match=message):
        planner(Problem((BlockType("block", block, 1),)), budget, max_seconds=max_seconds)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("", "block types is empty; give at least one"),
        ("aba", r"block types are named \['a', 'b', 'a'\]; give each a name of its own"),
    ],
)
def test_kinds(block, names, message):
    with pytest.raises(ValueError, match=message):
        Problem(tuple(BlockType(name, block, 1) for name in names))


@pytest.mark.parametrize(
    ("calls_per_block", "order", "message"),
    [
        (2, "aab", "order is given, but each block of block type 'b' is called more than once"),
        (1, "aab", r"order names {'a': 2, 'b': 1} blocks by block type; the block types have {'a': 2, 'b': 2}"),
        (1, "aabbc", r"order names {'a': 2, 'b': 2, 'c': 1} blocks by block type; the block types have"),
        (1, "aa", r"order names {'a': 2} blocks by block type; the block types have {'a': 2, 'b': 2}"),
    ],
)
def test_order(block, calls_per_block, order, message):
    block_types = (BlockType("a", block, 2), BlockType("b", block, 2, calls_per_block))
    with pytest.raises(ValueError, match=message):
        Problem(block_types, tuple(order))


def test_blocks_that_backward_keeps_have_no_order(block):
    kept = replace(block, graph=block.graph.kept)
    assert not Problem((BlockType("a", block, 1), BlockType("b", kept, 1))).order
    with pytest.raises(ValueError, match="backward keeps what the blocks of block type 'b' store"):
        Problem((BlockType("a", block, 1), BlockType("b", kept, 1)), ("a", "b"))


def test_runs(block):
    block_types = (BlockType("a", block, 3), BlockType("b", block, 2))
    assert Problem(block_types).rows == ()
    assert Problem(block_types, order=tuple("abbaa")).rows == ((0, 1), (1, 2), (0, 2))


@pytest.mark.parametrize("bound", [-0.1, float("nan"), float("inf")])
def test_max_gradient_error(block, bound):
    with pytest.raises(ValueError, match=f"max_gradient_error is {bound}; it must be finite and non-negative"):
        Problem((BlockType("a", block, 1),), max_gradient_error=bound)


def test_a_policy_for_each_block(block):
    policy = Policy(("retain", "retain", "retain", "retain", None, None))
    with pytest.raises(ValueError, match="block type 'a' has 2 blocks; got 3 policies"):
        peak_bytes(Problem((BlockType("a", block, 4, calls_per_block=2),)), [[policy] * 3])


def test_smallest_peak_request(block):
    with pytest.raises(ValueError, match="max_seconds is nan"):
        least_peak(Problem((BlockType("block", block, 1),)), float("nan"))


def test_frontier_request(block):
    with pytest.raises(ValueError, match="max_seconds is 0; it must be finite and positive"):
        frontier(block, max_seconds=0)
