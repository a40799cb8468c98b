"""Policies for another input size, found without a solver."""

from dataclasses import replace

import pytest

from ds_adacc import planner
from ds_adacc.plan.block_type import TypePlan
from ds_adacc.plan.correction import Correction
from ds_adacc.sizes.policy_search import PolicySearch

BLOCKS = 2


@pytest.fixture
def profile():
    """x gives a, and a gives b. A replay of a takes 300 bytes besides. A lossy codec would be quicker than replays."""
    values = tuple(
        planner.Value(name, "", nbytes, producer, True)
        for name, nbytes, producer in (("x", 10, None), ("a", 100, 0), ("b", 100, 1))
    )
    ops = (planner.Op("heavy", (0,), (1,), True, 300), planner.Op("light", (1,), (2,), True, 0))
    graph = planner.BlockGraph(values, ops, (planner.Event("light", (2,), 0), planner.Event("heavy", (1,), 0)))
    lossy = planner.CodecCost("int4", 99, 1e-6, 1e-6, 0.1, 0, gradient_error=0.01)
    return planner.Profile(graph, (2e-3, 1e-3), ((), (lossy,), (lossy,)))


def found(profile, limit):
    """The stores of each block, for blocks that retain everything at the other size; None if nothing fits."""
    spec = planner.BlockType("block", profile, BLOCKS)
    relative = TypePlan(spec, (planner.retain_policy(profile),) * BLOCKS, {}, Correction())
    policies = PolicySearch(relative, profile, {"block": relative}, [], {}, lambda index, policy: True).policies(limit)
    return policies and [policy.stores for policy in policies]


def test_what_the_blocks_run_at_the_other_size_where_it_fits(profile):
    assert found(profile, 610) == [(None, "retain", "retain")] * BLOCKS


def test_where_it_does_not_they_recompute(profile):
    assert found(profile, 609) == found(profile, 520) == [("retain", None, None)] * BLOCKS


def test_where_that_takes_too_much_one_policy_without_a_loss(profile):
    """To replay a takes more than to retain it: b alone is replayed."""
    assert found(profile, 519) == found(profile, 510) == [(None, "retain", None)] * BLOCKS
    assert found(profile, 509) is None


def moving(nbytes, *costs):
    """One value that may be stored, which costs that."""
    graph = planner.BlockGraph((planner.Value("x", "", nbytes, None, True),), (), (planner.Event("e", (0,), 0),))
    return planner.Profile(graph, (), (costs,), (1.0, 1.0))


INT4, LINK = planner.CodecCost("int4", 100, 0.0, 0.0, 0.1, 0), planner.CodecCost.offload(400, 0.0, 0.0)


@pytest.mark.parametrize(("store", "here"), [("int4", "int4"), ("offload int4", "int4"), ("offload", "retain")])
def test_what_is_too_small_to_be_moved_to_the_host_stays_on_the_device(store, here):
    spec = planner.BlockType("block", moving(400, INT4, LINK), BLOCKS)
    relative = TypePlan(spec, (planner.Policy((store,)),) * BLOCKS, {}, Correction())
    small = moving(40, replace(INT4, nbytes=10))
    search = PolicySearch(relative, small, {"block": relative}, [], {}, lambda index, policy: True)
    assert [policy.stores for policy in search.inherited()] == [(here,)] * BLOCKS


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_policies_that_hold_nothing_the_one_that_moves_less_is_the_leanest(order):
    spec = planner.BlockType("block", moving(400, INT4, LINK), BLOCKS)
    policies = planner.Policy(("offload",)), planner.Policy(("offload int4",))
    relative = TypePlan(spec, tuple(policies[number] for number in order), {}, Correction())
    search = PolicySearch(relative, spec.profile, {"block": relative}, [], {}, lambda index, policy: True)
    least = search.peak((policies[1],) * BLOCKS)
    assert search.peak(relative.policies) > least
    assert search.policies(least) == (policies[1],) * BLOCKS


def test_what_is_lent_is_inherited_as_it_is(profile):
    """Whether it counts, the blocks beside decide."""
    graph = profile.graph
    values = replace(graph.values[0], lent=True), *graph.values[1:]
    *earlier, last = graph.events
    lent = replace(profile, graph=replace(graph, values=values, events=(*earlier, replace(last, values=(1, 0)))))
    spec = planner.BlockType("block", lent, BLOCKS)
    for policy in (planner.no_checkpointing(lent), planner.retain_policy(lent)):
        relative = TypePlan(spec, (policy,) * BLOCKS, {}, Correction())
        search = PolicySearch(relative, lent, {"block": relative}, [], {}, lambda index, policy: True)
        assert search.inherited() == (policy,) * BLOCKS


def test_an_input_that_another_block_asks_for_by_now_is_retained(profile):
    graph = profile.graph
    spec = planner.BlockType("block", profile, BLOCKS)
    relative = TypePlan(spec, (planner.Policy((None, "retain", "retain")),) * BLOCKS, {}, Correction())
    *earlier, last = graph.events
    asked = replace(profile, graph=replace(graph, events=(*earlier, replace(last, values=(1, 0)))))
    search = PolicySearch(relative, asked, {"block": relative}, [], {}, lambda index, policy: True)
    assert [policy.stores for policy in search.inherited()] == [("retain", "retain", "retain")] * BLOCKS
