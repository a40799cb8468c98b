"""The simulator, against timelines worked out by hand on the `block` of conftest."""

from dataclasses import replace

import pytest
from ds_adacc.planner import OFFLOAD, BlockGraph, CodecCost, Event, Policy, Profile, Simulation, simulate


def test_retain_frees_each_value_after_its_last_use(block):
    policy = Policy(("retain", "retain", "retain", "retain", None, None), (2,))
    # x 100, a 40, b 10, c 60: b and c go after event 1, a after 2; d 30 lives in event 0 only
    timeline = (210 + 30 + 5, 210, 140 + 20, 100 + 1)
    assert simulate(block, policy) == Simulation(210, timeline, 0.5)


def test_compress_and_replay(block):
    policy = Policy(("retain", None, None, "int4", None, None), (0, 2))
    timeline = (
        100 + 15 + 60 + 30 + 5 + 7,  # d replayed from c: its payload, copy and codec's workspace stay for event 1
        100 + 15 + 60 + 40 + 10 + 7,  # b replayed from x, and a with it, which event 2 uses
        100 + 40 + 20,
        100 + 1,
    )
    assert simulate(block, policy) == Simulation(115, timeline, 0.5 + 1.0 + 3.0 + 4.0)


def test_a_chain_is_replayed_at_the_first_request(block):
    policy = Policy(("retain", None, None, None, None, None), (0, 1, 2))
    timeline = (100 + 40 + 10 + 60 + 30 + 5, 100 + 40 + 10 + 60, 100 + 40 + 20, 100 + 1)
    assert simulate(block, policy) == Simulation(100, timeline, 3.5)


def test_what_nothing_uses_is_held_to_the_end(block):
    policy = Policy(("retain", "retain", "retain", "retain", None, "retain"), (2,))
    assert simulate(block, policy).timeline == (265, 230, 180, 121)


def test_an_op_nothing_asks_for_does_not_run(block):
    policy = Policy(("retain", "retain", "retain", "retain", None, None), (0, 1, 2))
    assert simulate(block, policy).seconds == 0.5


def test_an_unused_output_never_comes_alive(block):
    policy = Policy(("retain", None, "retain", "retain", None, None), (0, 2))
    # the replay at event 2 makes a only: b is stored, and gone by then
    assert simulate(block, policy).timeline == (170 + 30 + 5, 170, 100 + 40 + 20, 101)


def test_a_replay_has_its_workspace_at_its_event_alone(block):
    split, grow, shrink, spare = block.graph.ops
    ops = (replace(split, workspace_bytes=50), grow, replace(shrink, workspace_bytes=6), spare)
    profile = replace(block, graph=replace(block.graph, ops=ops))
    policy = Policy(("retain", None, None, "int4", None, None), (0, 2))
    timeline = (
        100 + 15 + 60 + 30 + 5 + 7,  # int4's 7 bytes and shrink's 6 are not needed at once
        100 + 15 + 60 + 40 + 10 + 50,  # split's
        100 + 40 + 20,
        100 + 1,
    )
    assert simulate(profile, policy).timeline == timeline


def offloading(block, hiding_seconds):
    """The block with two values that may go to the host: a (2 s out, 3 s back) and x (5 s, 7 s)."""
    x, a = CodecCost(OFFLOAD, 0, 5.0, 7.0, 0.0, 0), CodecCost(OFFLOAD, 0, 2.0, 3.0, 0.0, 0)
    return replace(block, codecs=((x,), (a,), *block.codecs[2:]), hiding_seconds=hiding_seconds)


@pytest.mark.parametrize(
    ("hiding_seconds", "stalls"),
    [
        ((0.0, 0.0), 7.0 + 10.0),
        ((4.0, 9.0), 3.0 + 1.0),
        ((8.0, 9.0), 0.0 + 1.0),  # what forward hides beyond the transfers is of no use to backward
        ((6.5, 99.0), 0.5 + 0.0),
        ((7.0, 10.0), 0.0),
    ],
)
def test_offloaded_values_come_back_before_the_first_event(block, hiding_seconds, stalls):
    policy = Policy((OFFLOAD, OFFLOAD, "retain", "retain", None, None), (2,))
    # as if retained: a 40 is alive up to event 2, x 100 to the last; meanwhile the call held b and c alone
    timeline = (210 + 30 + 5, 210, 140 + 20, 100 + 1)
    expected = Simulation(70, timeline, 0.5 + stalls, fetched=140)
    assert simulate(offloading(block, hiding_seconds), policy) == expected
    assert (expected.inner_peak, expected.transient) == (245, 175)


def test_an_offloaded_value_nothing_uses_is_alive_to_the_end(block):
    spare = CodecCost(OFFLOAD, 0, 1.0, 1.0, 0.0, 0)
    profile = replace(block, codecs=(*block.codecs[:5], (spare,)))
    policy = Policy(("retain", "retain", "retain", "retain", None, OFFLOAD), (2,))
    run = simulate(profile, policy)
    assert (run.held, run.timeline, run.fetched) == (210, (265, 230, 180, 121), 20)


def test_a_block_with_no_transient(block):
    events = (Event("a", (1,), 0), Event("x", (0,), 0))
    profile = replace(block, graph=replace(block.graph, events=events))
    run = simulate(profile, Policy(("retain", "retain", None, None, None, None), ()))
    assert (run.timeline, run.inner_peak, run.transient) == ((140, 100), 140, 0)


def test_a_block_with_no_backward():
    run = simulate(Profile(BlockGraph((), (), ()), (), ()), Policy((), ()))
    assert (run, run.inner_peak, run.transient) == (Simulation(0, (), 0.0), 0, 0)
