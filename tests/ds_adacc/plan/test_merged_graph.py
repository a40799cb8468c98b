"""One graph from those of several ranks, and what a block lends to others."""

from dataclasses import replace

import pytest

from ds_adacc import planner
from ds_adacc.plan.merged_graph import lending, merged_graph


@pytest.fixture
def graph():
    """A block that makes y of two inputs, and z of y. Backward needs both."""
    values = tuple(
        planner.Value(name, "", nbytes, producer, True)
        for name, nbytes, producer in (("x", 4, None), ("bias", 8, None), ("y", 64, 0), ("z", 16, 1))
    )
    ops = planner.Op("add", (0, 1), (2,), True), planner.Op("exp", (2,), (3,), True)
    return planner.BlockGraph(values, ops, (planner.Event("z", (3,), 0), planner.Event("y", (2,), 0)))


def test_the_last_step_of_backward_asks_for_what_is_lent(graph):
    lent = lending(graph, [1])
    assert [event.values for event in lent.events] == [(3,), (2, 1)]
    assert [value.lent for value in lent.values] == [False, True, False, False]
    assert lending(lent, [1]) == lent


def test_what_backward_asks_for_anyway_is_not_lent(graph):
    assert lending(graph, [2]) == graph


def test_what_the_backward_of_another_block_asks_for_counts_without_checkpointing(graph):
    asked = lending(lending(graph, [1]), [1], [1])
    assert [event.values for event in asked.events] == [(3,), (2, 1)]
    assert not any(value.lent for value in asked.values)
    assert lending(asked, [1]) == asked
    for ranks in ([asked, lending(graph, [1])], [lending(graph, [1]), asked], [graph, asked]):
        assert merged_graph(ranks) == asked


@pytest.mark.parametrize("first", [True, False])
def test_what_one_rank_lends_all_count(graph, first):
    """The rank that lends is not the one that takes the most."""
    larger = replace(graph, values=(*graph.values[:3], replace(graph.values[3], nbytes=32)))
    lent = replace(lending(graph, [1]), carried_bytes=8)
    merged = merged_graph([lent, larger] if first else [larger, lent])
    assert [value.nbytes for value in merged.values] == [4, 8, 64, 32]
    assert [event.values for event in merged.events] == [(3,), (2, 1)]
    assert [value.lent for value in merged.values] == [False, True, False, False]
    assert merged.carried_bytes == 8


def test_a_block_of_which_backward_runs_nothing_lends_nothing(graph):
    """As one that returns its input, since it drops out as a whole."""
    empty = replace(graph, events=())
    assert merged_graph([empty, empty]) == lending(empty, ()) == empty
