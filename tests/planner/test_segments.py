"""Values that only pass through a replay, and the bytes that the replay takes with them."""

from dataclasses import replace

import pytest

from ds_adacc.planner import (
    BlockGraph,
    Event,
    Op,
    Policy,
    Profile,
    Segment,
    Segments,
    Value,
    recompute_policy,
    retain_policy,
    simulate,
)

X, Q, TWICE, TURNED, ROTATED = range(5)


def rotation(**storable):
    """x gives q; of q, twice and turned are made, which together make `rotated`. Backward asks for that, then for x."""
    sizes = {"x": 100, "q": 10, "twice": 20, "turned": 5, "rotated": 8}
    producers = None, 0, 1, 2, 3
    values = tuple(
        Value(name, "", size, producer, name in ("x", "rotated") or name in storable)
        for (name, size), producer in zip(sizes.items(), producers, strict=True)
    )
    ops = (
        Op("project", (X,), (Q,), True, 3),
        Op("double", (Q,), (TWICE,), True),
        Op("turn", (Q,), (TURNED,), True, 40),
        Op("add", (TWICE, TURNED), (ROTATED,), True, 1),
    )
    return BlockGraph(values, ops, (Event("rotated", (ROTATED,), 50, 30), Event("x", (X,), 0)))


def passing(graph):
    storable = {index for index, value in enumerate(graph.values) if value.storable}
    return Segments(graph.ops, storable, graph.saved).passing


def test_what_leads_to_one_output_alone_passes():
    graph = rotation()
    assert passing(graph) == {Q: 3, TWICE: 3, TURNED: 3}
    # q and twice are there while turned is made with its 40, and the room of `rotated` is still free
    assert graph.replay_bytes == {3: 10 + 20 + 5 + 40 - 8}
    assert graph.segments == {3: Segment((0, 1, 2, 3), (X,), {Q: 2, TWICE: 3, TURNED: 3})}


def test_what_can_be_stored_does_not_pass():
    assert passing(rotation(q=True)) == {TWICE: 3, TURNED: 3}
    assert passing(rotation(twice=True)) == {TURNED: 3}, "q is read for twice as well"


def test_what_two_outputs_need_does_not_pass():
    graph = rotation()
    values = (*graph.values, Value("other", "", 8, 4, True))
    other = BlockGraph(
        values, (*graph.ops, Op("other", (Q,), (5,), True)), (Event("both", (ROTATED, 5), 0), Event("x", (X,), 0))
    )
    assert passing(other) == {TWICE: 3, TURNED: 3}
    unasked = BlockGraph(values, other.ops, graph.events)
    assert passing(unasked) == passing(graph), "nobody asks for the other output"
    refused = BlockGraph(values, (*graph.ops, Op("other", (Q,), (5,), False)), graph.events)
    assert passing(refused) == passing(graph)


@pytest.mark.parametrize(
    ("stores", "replayed"),
    [
        (("retain", "retain", "retain", "retain", None, None), (2,)),  # d, from c
        (("retain", "retain", "retain", None, None, None), (1, 2)),  # c as well, from a
        (("retain", "retain", None, "retain", None, None), (0, 2)),  # b, from x; a, its sister, is there
        (("retain", None, None, None, None, None), (0, 1, 2)),
        (("retain", "retain", "retain", "retain", "retain", None), ()),  # nothing needs e
    ],
)
def test_what_backward_needs_and_nothing_stores_is_replayed(block, stores, replayed):
    assert block.graph.replayed(stores) == replayed


def test_a_replay_is_over_before_the_step_takes_its_bytes():
    graph = rotation()
    profile = Profile(graph, (0.0,) * 4, ((),) * 5)
    assert recompute_policy(profile) == Policy(("retain", None, None, None, None))
    # x, rotated, the gradients, and what the replay takes above the 30 that come after it
    assert simulate(profile, recompute_policy(profile)).timeline == (100 + 8 + 50 + (67 - 30), 100)


@pytest.mark.parametrize(("late", "room"), [(0, 0), (5, 5), (8, 8), (20, 8)])
def test_late_bytes_take_the_place_of_copies(late, room):
    """`rotated` has 8 bytes. They are gone when the step takes its late bytes, but not if the value is retained."""
    graph = rotation()
    graph = replace(graph, events=(Event("rotated", (ROTATED,), 50, 50, late), Event("x", (X,), 0)))
    profile = Profile(graph, (0.0,) * 4, ((),) * 5)
    while_replaying, with_gradients = 100 + 8 + 67, 100 + 8 + 50 - room
    assert simulate(profile, recompute_policy(profile)).timeline == (max(while_replaying, with_gradients), 100)
    quick = replace(graph, ops=tuple(replace(op, workspace_bytes=0) for op in graph.ops))
    profile = replace(profile, graph=quick)
    assert simulate(profile, recompute_policy(profile)).timeline[0] == max(100 + 8 + 27, with_gradients)
    assert simulate(profile, retain_policy(profile)).timeline[0] == 100 + 8 + 50


@pytest.mark.parametrize(
    ("late", "after", "retained", "copied"), [(20, 5, 5, 8), (20, 20, 8, 8), (6, 6, 6, 6), (4, 3, 3, 4)]
)
def test_what_comes_after_a_step_takes_the_place_of_what_was_retained_too(late, after, retained, copied):
    graph = rotation()
    events = (Event("rotated", (ROTATED,), 50, 50, late, after), Event("x", (X,), 0))
    graph = replace(graph, events=events, ops=tuple(replace(op, workspace_bytes=0) for op in graph.ops))
    profile = Profile(graph, (0.0,) * 4, ((),) * 5)
    assert simulate(profile, retain_policy(profile)).timeline[0] == 100 + 8 + 50 - retained
    assert simulate(profile, recompute_policy(profile)).timeline[0] == max(100 + 8 + 27, 100 + 8 + 50 - copied)
    kept = replace(profile, graph=graph.kept)
    assert simulate(kept, retain_policy(kept)).timeline == (100 + 8 + 50, 100 + 8)
    assert simulate(kept, recompute_policy(kept)).timeline[0] == max(100 + 8 + 27, 100 + 8 + 50 - min(late, 8))


@pytest.mark.parametrize(("store", "held"), [("retain", 100), (None, 0)])
def test_what_is_stored_stays_until_nothing_is_rebuilt_from_it_any_more(store, held):
    """a is not listed, but b and c are made of it: it is held until c, the last to be asked for, is."""
    values = (
        Value("x", "", 1, None, True),
        Value("a", "", 100, 0, True),
        Value("b", "", 2, 1, True),
        Value("c", "", 4, 2, True),
    )
    ops = (Op("a", (0,), (1,), True), Op("b", (1,), (2,), True), Op("c", (2,), (3,), True))
    events = (Event("c", (3,), 0), Event("b", (2,), 0), Event("x", (0,), 0))
    graph = BlockGraph(values, ops, events)
    assert graph.kept_until == (2, 1, 1, 0)
    profile = Profile(graph, (0.0,) * 3, ((),) * 4)
    policy = Policy(("retain", store, None, None))
    policy.check(profile)
    # while b and c are rebuilt, a is there in either case
    assert simulate(profile, policy).timeline == (1 + 100 + 2 + 4, 1 + held + 2, 1)
