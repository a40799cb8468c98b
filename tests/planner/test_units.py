"""Each number of a graph and of a cost has a unit, and becomes one with others by it."""

from dataclasses import replace
from statistics import fmean
from typing import get_type_hints

import pytest

from ds_adacc.planner import BlockGraph, CodecCost, Event, Op, Value, combined_offers
from ds_adacc.planner.units import (
    Bytes,
    DeductedBytes,
    Error,
    GradientError,
    Guarantee,
    Seconds,
    combined,
    numbers,
    units_of,
)

PLAIN = {"producer", "storable", "on_request", "alive_until", "cached", "lent"}  # the structure of the graph
COST = CodecCost("a", 1, 2.0, 3.0, 0.4, 5, 0.6, False, 7, 8.0, 9.0)
GRAPH = BlockGraph(
    (Value("x", "", 4, None, True), Value("y", "", 6, 0, True)),
    (Op("f", (0,), (1,), True, 3),),
    (Event("end", (0, 1), 9, 5, 2, 1),),
    7,
    8,
)


@pytest.mark.parametrize("kind", [Value, Op, Event, BlockGraph, CodecCost])
def test_every_number_has_a_unit(kind):
    plain = {name for name, of in get_type_hints(kind).items() if of in (int, float, bool, int | None)} - PLAIN
    assert plain == set(units_of(kind))


def test_numbers_become_one_by_their_unit():
    other = replace(COST, nbytes=3, compress_seconds=6.0, error=0.2, gradient_error=0.8, moved_bytes=1)
    by = {Bytes: max, Seconds: fmean, Error: min, GradientError: max, Guarantee: all}
    assert combined([COST, other], by) == replace(COST, nbytes=3, compress_seconds=4.0, error=0.2, gradient_error=0.8)
    lossless = replace(COST, error=0.0, gradient_error=0.0, lossless=True)
    assert combined([lossless, lossless], by) == lossless
    assert combined([replace(lossless, nbytes=2), COST], {Guarantee: all}) == replace(
        lossless, nbytes=2, lossless=False
    )


def test_a_graph_becomes_one_with_its_parts():
    by = {Bytes: sum, DeductedBytes: min, Guarantee: all}
    other = replace(GRAPH, ops=(Op("f", (0,), (1,), False, 1),), events=(Event("end", (0, 1), 1, 0, 3),))
    assert BlockGraph.combined([GRAPH, other], by) == BlockGraph(
        (Value("x", "", 8, None, True), Value("y", "", 12, 0, True)),
        (Op("f", (0,), (1,), False, 4),),
        (Event("end", (0, 1), 10, 0, 2),),
        14,
        16,
    )
    with pytest.raises(ValueError, match="shorter"):
        BlockGraph.combined([GRAPH, replace(GRAPH, events=())], by)


def test_only_what_all_offer_is_offered():
    first, second, third = (replace(COST, codec=name) for name in "abc")
    doubled = replace(first, nbytes=2, workspace_bytes=10, moved_bytes=14)
    assert combined_offers([(third, first, second), (first,)], {Bytes: sum}) == (doubled,)
    assert combined_offers([(first,), (second,)], {Bytes: sum}) == ()


def test_all_numbers_of_a_unit_are_found():
    assert sorted(numbers(COST, Bytes)) == [1, 5, 7]
    assert list(numbers(GRAPH.events[0], Bytes, DeductedBytes)) == [9, 5, 2, 1]
