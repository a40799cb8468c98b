"""What puts a gradient off: lossy codecs, and ops whose stored output belongs to an input that has changed since."""

import math

import pytest

from ds_adacc.planner import (
    RETAIN,
    BlockGraph,
    BlockType,
    CodecCost,
    Event,
    Op,
    Policy,
    Problem,
    Profile,
    Value,
    gradient_error,
    solve_per_block,
    stale_ops,
)
from ds_adacc.planner.error_estimate import altered_values

# x -> norm -> qkv -> (out, lse); backward of the attention reads qkv, out and lse together
VALUES = ("x", "norm", "qkv", "out", "lse")
GRAPH = BlockGraph(
    tuple(Value(name, "other", 64, producer, True) for name, producer in zip(VALUES, (None, 0, 1, 2, 2), strict=True)),
    (Op("norm", (0,), (1,), True), Op("linear", (1,), (2,), True), Op("attention", (2,), (3, 4), True)),
    (Event("attention backward", (2, 3, 4), 0), Event("linear backward", (1,), 0), Event("norm backward", (0,), 0)),
)
OFFERS = (
    (),
    (CodecCost("int4", 16, 0.0, 0.0, 0.1, 0, 0.03),),
    (CodecCost("int4", 16, 0.0, 0.0, 0.1, 0, 0.04), CodecCost("exact", 60, 0.0, 0.0, 0.0, 0, lossless=True)),
    (),
    (),
)
PROFILE = Profile(GRAPH, (1.0, 1.0, 5.0), OFFERS, stale_errors=(0.0, 0.0, 100.0))


def policy(norm=RETAIN, qkv=RETAIN, out=RETAIN, lse=RETAIN):
    stores = (RETAIN, norm, qkv, out, lse)
    return Policy(stores)


def test_only_what_one_step_of_backward_reads_is_read_together():
    assert GRAPH.read_together == {2: ((2,), (3, 4))}


@pytest.mark.parametrize(
    ("chosen", "altered", "stale"),
    [
        (policy(), set(), ()),
        (policy(qkv="exact"), set(), ()),
        (policy(qkv="int4"), {2}, (2,)),
        (policy(qkv="int4", out=None), {2, 3}, (2,)),
        (policy(qkv="int4", out=None, lse=None), {2, 3, 4}, ()),
        (policy(norm="int4"), {1}, ()),
        (policy(norm="int4", qkv=None), {1, 2}, (2,)),
        (policy(norm="int4", qkv=None, out=None, lse=None), {1, 2, 3, 4}, ()),
    ],
)
def test_a_stored_output_of_an_altered_input_is_stale(chosen, altered, stale):
    assert altered_values(PROFILE, chosen) == altered
    assert stale_ops(PROFILE, chosen) == stale


def test_errors_add_up_as_squares():
    assert gradient_error(PROFILE, policy(norm="int4", qkv="int4", out=None, lse=None)) == pytest.approx(0.05)
    assert gradient_error(PROFILE, policy(qkv="int4")) == pytest.approx(math.hypot(0.04, 100))


@pytest.mark.parametrize("bound", [0.05, 1000.0])
def test_the_solver_replays_a_fragile_op_on_its_lossy_input(bound):
    problem = Problem((BlockType("block", PROFILE, 8),), max_gradient_error=bound)
    budget = (
        8 * policy(norm="int4", qkv="int4").held_bytes(PROFILE) + 250
    )  # replays are slower, so they are for the bound
    chosen = solve_per_block(problem, budget, max_seconds=60).policies[0]
    assert all(gradient_error(PROFILE, each) <= bound for each in chosen)
    assert all(stale_ops(PROFILE, each) == () for each in chosen) == (bound == 0.05)
