"""Bytes at other micro-batch sizes lie on the line through two that were recorded."""

from dataclasses import replace

import pytest

from ds_adacc import planner
from ds_adacc.cli.batch_size import BatchLine, Incomparable


def problem(values, gradients=0, workspace=0, codecs=(), name="op", replayable=True, count=3):
    """A block whose values, one after the other, take so many bytes; the last is asked for by backward, then all."""
    made = tuple(planner.Value(f"v{n}", "", size, n - 1 if n else None, True) for n, size in enumerate(values))
    ops = tuple(planner.Op(name, (n,), (n + 1,), replayable, workspace) for n in range(len(values) - 1))
    events = tuple(planner.Event(f"e{n}", (n,), gradients) for n in reversed(range(len(values))))
    offers = (tuple(codecs), *[()] * (len(values) - 1))
    profile = planner.Profile(planner.BlockGraph(made, ops, events), (1.0,) * len(ops), offers)
    return planner.Problem((planner.BlockType("block", profile, count),), order=("block",) * count)


def codec(name, nbytes, workspace=0):
    return planner.CodecCost(name, nbytes, 1.0, 1.0, 0.1, workspace)


def of(line, batch):
    return line.at(batch).block_types[0].profile


def test_every_number_of_bytes_is_on_its_line_rounded_up():
    small = problem([100, 7], 50, 10, [codec("a", 20, 5), codec("b", 1)])
    large = problem([190, 8], 50, 40, [codec("c", 1), codec("a", 50, 5)])
    line = BatchLine((small, large), (2, 5))
    profile = of(line, 3)
    assert [value.nbytes for value in profile.graph.values] == [130, 8]
    assert [op.workspace_bytes for op in profile.graph.ops] == [20]
    assert [event.gradient_bytes for event in profile.graph.events] == [50, 50]
    assert profile.codecs == ((codec("a", 30, 5),), ())
    assert [value.nbytes for value in of(line, 1).graph.values] == [70, 7]
    assert [value.nbytes for value in of(line, 11).graph.values] == [370, 10]


def test_at_the_recorded_sizes_the_bytes_are_the_recorded_ones():
    small, large = problem([100, 7], 50), problem([191, 9], 20)
    line = BatchLine((small, large), (2, 5))
    assert line.at(2) == small and line.at(5) == large


def with_inputs(*nbytes):
    """A problem of one block with inputs of these sizes."""
    values = tuple(planner.Value(f"x{i}", "block_input", n, None, True) for i, n in enumerate(nbytes))
    graph = planner.BlockGraph(values, (), (planner.Event("end", (0,), 0),))
    profile = planner.Profile(graph, (), ((),) * len(values))
    return planner.Problem((planner.BlockType("b", profile, count=1),))


def test_offsets_of_packed_texts_have_a_line_as_well():
    """One more than there are texts."""
    line = BatchLine((with_inputs(200, 12), with_inputs(400, 20)), (2, 4))
    assert [value.nbytes for value in line.at(3).block_types[0].profile.graph.values] == [300, 16]
    with pytest.raises(Incomparable, match="takes 200 B at micro-batch 2 and 390 B at 4"):
        BatchLine((with_inputs(200, 12), with_inputs(390, 20)), (2, 4))


def test_bytes_are_never_below_nothing():
    line = BatchLine((problem([10, 10]), problem([100, 100])), (2, 4))
    assert [value.nbytes for value in of(line, 1).graph.values] == [0, 0]


def test_what_is_replayable_at_one_size_only_is_not():
    line = BatchLine((problem([1, 1]), problem([2, 2], replayable=False)), (1, 2))
    assert not of(line, 1).graph.ops[0].replayable


def test_the_largest_size_is_the_last_whose_peak_fits():
    line = BatchLine((problem([100, 10]), problem([200, 20])), (1, 2))
    retained = [[planner.retain_policy(of(line, 1))] * 3]
    assert planner.peak_bytes(line.at(4), retained) == 1320
    assert line.largest(retained, 1320) == 4
    assert line.largest(retained, 1319) == 3
    assert line.largest(retained, 329) == 0


def test_what_does_not_grow_is_bounded_by_nothing():
    line = BatchLine((problem([100]), problem([100])), (1, 2))
    assert line.largest([[planner.retain_policy(of(line, 1))] * 3], 300) is None


@pytest.mark.parametrize(
    "other",
    [
        problem([2, 2, 2]),
        problem([2, 2], name="other"),
        problem([2, 2], count=4),
        replace(problem([2, 2]), order=()),
    ],
)
def test_programs_that_differ_are_not_compared(other):
    with pytest.raises(Incomparable, match="at micro-batch 4 the blocks run other operators than at 2"):
        BatchLine((problem([1, 1]), other), (2, 4))
