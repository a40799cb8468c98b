"""The simulator, against timelines worked out by hand on the `block` of conftest."""

from dataclasses import replace

import pytest
from hypothesis import given
from random_blocks import SMALL, examples, points, profiles

from ds_adacc.planner import (
    OFFLOAD,
    BlockGraph,
    CodecCost,
    Event,
    Policy,
    Profile,
    Simulation,
    is_codec,
    nearest_offer,
    simulate,
)
from ds_adacc.planner.profile import payload_offloaded


def test_retain_frees_each_value_after_its_last_use(block):
    policy = Policy(("retain", "retain", "retain", "retain", None, None))
    # x 100, a 40, b 10, c 60: b and c go after event 1, a after 2; d 30 lives in event 0 only
    timeline = (210 + 30 + 5, 210, 140 + 20, 100 + 1)
    # e and d, which nothing reads, are there to the end
    forward = (100 + 40 + 10, 150 + 60, 210 + 30, 240 + 20)
    assert simulate(block, policy) == Simulation(210, forward, timeline, 0.5)


def test_compress_and_replay(block):
    policy = Policy(("retain", None, None, "int4", None, None))
    timeline = (
        100 + 15 + 60 + 30 + 5 + 7,  # d replayed from c: its payload, copy and codec's workspace stay for event 1
        100 + 15 + 60 + 40 + 10 + 7,  # b replayed from x, and a with it, which event 2 uses
        100 + 40 + 20,
        100 + 1,
    )
    # as soon as c is there, so are its payload and the codec's workspace; a goes with its reader, b and x stay
    forward = (150, 150 + 60 + 15 + 7, 110 + 60 + 15 + 30 + 7, 110 + 60 + 15 + 30 + 20 + 7)
    assert simulate(block, policy) == Simulation(115, forward, timeline, 0.5 + 1.0 + 3.0 + 4.0)


def test_a_chain_is_replayed_at_the_first_request(block):
    policy = Policy(("retain", None, None, None, None, None))
    timeline = (100 + 40 + 10 + 60 + 30 + 5, 100 + 40 + 10 + 60, 100 + 40 + 20, 100 + 1)
    forward = (150, 150 + 60, 110 + 60 + 30, 110 + 60 + 30 + 20)
    assert simulate(block, policy) == Simulation(100, forward, timeline, 3.5)


def test_what_is_stored_stays_if_backward_keeps_its_graph(block):
    kept = replace(block, graph=block.graph.kept)
    retained = Policy(("retain", "retain", "retain", "retain", None, None))
    assert simulate(kept, retained).timeline == (210 + 30 + 5, 210, 210 + 20, 210 + 1)
    # the copies of c, d and b go as ever, and so does a, which is replayed along with b; the payload of c stays
    packed = Policy(("retain", None, None, "int4", None, None))
    before = (100 + 15 + 60 + 30 + 5 + 7, 100 + 15 + 60 + 40 + 10 + 7)
    assert simulate(kept, packed).timeline == (*before, 100 + 15 + 40 + 20, 100 + 15 + 1)
    for policy in (retained, packed):
        freed, run = simulate(block, policy), simulate(kept, policy)
        assert replace(run, timeline=freed.timeline) == freed


def test_what_nothing_uses_is_held_to_the_end(block):
    policy = Policy(("retain", "retain", "retain", "retain", None, "retain"))
    assert simulate(block, policy).timeline == (265, 230, 180, 121)


def test_an_unused_output_never_comes_alive(block):
    policy = Policy(("retain", None, "retain", "retain", None, None))
    # the replay at event 2 makes a only: b is stored, and gone by then
    assert simulate(block, policy).timeline == (170 + 30 + 5, 170, 100 + 40 + 20, 101)


def test_a_replay_has_its_workspace_at_its_event_alone(block):
    split, grow, shrink, spare = block.graph.ops
    ops = (replace(split, workspace_bytes=50), grow, replace(shrink, workspace_bytes=6), spare)
    profile = replace(block, graph=replace(block.graph, ops=ops))
    policy = Policy(("retain", None, None, "int4", None, None))
    timeline = (
        100 + 15 + 60 + 30 + 5 + 7,  # int4's 7 bytes and shrink's 6 are not needed at once
        100 + 15 + 60 + 40 + 10 + 50,  # split's
        100 + 40 + 20,
        100 + 1,
    )
    run = simulate(profile, policy)
    assert run.timeline == timeline
    # split's 50, then the larger of the codec's 7 and shrink's 6
    assert run.forward == (150 + 50, 225 + 7, 215 + 7, 235 + 7)
    assert (run.inner_peak, run.transient) == (275, 275 - 115)


def test_forward_overhead_is_there_throughout_forward(block):
    policy = Policy(("retain", None, None, "int4", None, None))
    run = simulate(block, policy)
    more = simulate(replace(block, graph=replace(block.graph, forward_overhead=33)), policy)
    assert more == replace(run, forward=tuple(alive + 33 for alive in run.forward))
    assert (more.inner_peak, more.transient) == (242 + 33, 242 + 33 - 115)


def test_what_a_cache_holds_stays_to_the_end_of_forward_whatever_is_stored(block):
    """The cache holds `a` of 40 bytes, which `grow` reads last."""
    values = tuple(replace(value, cached=value.name == "a") for value in block.graph.values)
    cached = replace(block, graph=replace(block.graph, values=values))
    replay = Policy(("retain", None, None, None, None, None))
    without = simulate(block, replay)
    assert without.forward == (150, 210, 200, 220)
    assert simulate(cached, replay) == replace(without, forward=(150, 210, 200 + 40, 220 + 40), cached=40)
    retain = Policy(("retain", "retain", None, None, None, None))
    assert simulate(cached, retain) == simulate(block, retain)


def forward_by_steps(profile, policy):
    """The bytes at each op, by a walk that knows what is still to be read."""
    graph, line = profile.graph, []
    names = {value: store for value, store in enumerate(policy.stores) if store not in (None, "retain")}
    offers = {value: profile.codec(value, name) for value, name in names.items()}
    full = {value for value, known in enumerate(graph.values) if known.producer is None}
    payloads = set(full)
    for number, op in enumerate(graph.ops):
        full.update(op.outputs)
        payloads.update(op.outputs)
        workspace = max([op.workspace_bytes] + [offers[value].workspace_bytes for value in full if value in offers])
        alive = sum(graph.values[value].nbytes for value in full)
        alive += sum(offers[value].payload_bytes for value in payloads if is_codec(policy.stores[value]))
        line.append(graph.forward_overhead + alive + workspace)
        to_read = {value for later in graph.ops[number + 1 :] for value in later.inputs}
        done = {value for value in op.inputs if graph.values[value].producer is not None and value not in to_read}
        full -= {
            value
            for value in done
            if policy.stores[value] not in ("retain", OFFLOAD) and not graph.values[value].cached
        }
    return tuple(line)


@examples(100)
@given(profiles(SMALL))
def test_forward_is_that_of_a_walk_through_its_ops(profile):
    for point in points(profile):
        assert point.simulation.forward == forward_by_steps(profile, point.policy)


def offloading(block, overlap_seconds):
    """The block with two values that may go to the host: a (2 s out, 3 s back) and x (5 s, 7 s)."""
    x, a = (
        CodecCost.offload(100, 5.0, 7.0),
        CodecCost.offload(40, 2.0, 3.0),
    )
    return replace(block, codecs=((x,), (a,), *block.codecs[2:]), overlap_seconds=overlap_seconds)


@pytest.mark.parametrize(
    ("overlap_seconds", "stalls"),
    [
        ((0.0, 0.0), 7.0 + 10.0),
        ((4.0, 12.0), 4.0 + 1.0),  # 0.75 of it hides transfers: 3 and 9 seconds
        ((10.0, 12.0), 0.0 + 1.0),  # what forward hides beyond the transfers is of no use to backward
        ((9.0, 99.0), 0.25 + 0.0),
        ((10.0, 14.0), 0.0),
    ],
)
def test_offloaded_values_come_back_before_the_first_event(block, overlap_seconds, stalls):
    policy = Policy((OFFLOAD, OFFLOAD, "retain", "retain", None, None))
    # as if retained: a 40 is alive up to event 2, x 100 to the last; meanwhile the call held b and c alone
    timeline = (210 + 30 + 5, 210, 140 + 20, 100 + 1)
    # in forward both are there to the end: they are being copied
    forward = (150, 210, 240, 260)
    expected = Simulation(70, forward, timeline, 0.5 + stalls, fetched=140)
    assert simulate(offloading(block, overlap_seconds), policy) == expected
    assert (expected.inner_peak, expected.transient) == (260, 190)


@pytest.mark.parametrize(("overlap_seconds", "stalls"), [((0.0, 0.0), 0.5 + 0.75), ((0.4, 2.0), 0.2 + 0.0)])
def test_an_offloaded_payload_is_copied_in_place_of_the_value(block, overlap_seconds, stalls):
    """c takes 60 bytes, its payload 15: a quarter of the value's copies, which take 2 and 3 seconds."""
    away = CodecCost.offload(60, 2.0, 3.0)
    codecs = (*block.codecs[:3], (*block.codecs[3], away), *block.codecs[4:])
    profile = replace(block, codecs=codecs, overlap_seconds=overlap_seconds)
    compressed = simulate(profile, Policy(("retain", None, None, "int4", None, None)))
    policy = Policy(("retain", None, None, payload_offloaded("int4"), None, None))
    # only between forward and backward is it away: it stays to the end of forward, and is there when backward begins
    assert simulate(profile, policy) == replace(
        compressed, held=compressed.held - 15, seconds=compressed.seconds + stalls, fetched=15
    )
    (int4,) = block.codecs[3]
    assert profile.codec(3, payload_offloaded("int4")) == replace(
        int4, codec="offload int4", nbytes=0, moved_bytes=15, out_seconds=0.5, back_seconds=0.75
    )


@pytest.mark.parametrize(
    ("store", "offers", "expected"),
    [
        ("int4", ["int4"], "int4"),
        ("int4", ["offload"], "retain"),
        ("offload", ["int4", "offload"], "offload"),
        ("offload", ["int4"], "retain"),
        ("offload int4", ["int4", "offload"], "offload int4"),
        ("offload int4", ["int4"], "int4"),
        ("offload int4", ["int8", "offload"], "offload"),
        ("offload int4", [], "retain"),
    ],
)
def test_of_a_store_what_is_on_offer_stays(store, offers, expected):
    assert nearest_offer(store, offers) == expected


def test_of_the_offloaded_payloads_a_search_has_the_smallest_within_the_bound(block):
    codecs = [CodecCost(f"c{n}", n, 0.0, 0.0, 0.1, 0, gradient_error=1 / n) for n in (5, 10, 20)]
    profile = replace(block, codecs=((*codecs, CodecCost.offload(100, 1.0, 1.0)), *block.codecs[1:]))
    for bound, smallest in ((None, "c5"), (0.2, "c5"), (0.1, "c10"), (0.05, "c20")):
        names = [offer.codec for offer in profile.offers_within(0, bound)]
        assert [name for name in names if name.startswith("offload ")] == [f"offload {smallest}"]
        assert "offload" in names and [name for name in names if name[0] == "c"] == [
            codec.codec for codec in codecs if bound is None or codec.gradient_error <= bound
        ]


def test_the_payload_of_a_value_that_may_not_be_offloaded_stays(block):
    with pytest.raises(ValueError, match=r"'c' is stored as 'offload int4'; on offer are \['retain', 'int4'\]"):
        simulate(block, Policy(("retain", None, None, payload_offloaded("int4"), None, None)))


def test_an_offloaded_value_nothing_uses_is_alive_to_the_end(block):
    spare = CodecCost.offload(20, 1.0, 1.0)
    profile = replace(block, codecs=(*block.codecs[:5], (spare,)))
    policy = Policy(("retain", "retain", "retain", "retain", None, OFFLOAD))
    run = simulate(profile, policy)
    assert (run.held, run.timeline, run.fetched) == (210, (265, 230, 180, 121), 20)


def test_a_block_with_no_transient(block):
    split = BlockGraph(block.graph.values[:3], block.graph.ops[:1], (Event("ab", (1, 2), 0), Event("x", (0,), 0)))
    run = simulate(Profile(split, (1.0,), ((),) * 3), Policy(("retain",) * 3))
    assert (run.forward, run.timeline, run.inner_peak, run.transient) == ((150,), (150, 100), 150, 0)


def test_a_block_with_no_backward():
    run = simulate(Profile(BlockGraph((), (), ()), (), ()), Policy(()))
    assert (run, run.inner_peak, run.transient) == (Simulation(0, (), (), 0.0), 0, 0)
