"""The memory that gradients take in a run of autograd's graph, counted by hand on small graphs."""

from dataclasses import replace

import pytest
import torch

from ds_adacc.profile.gradient_memory import GradientMemory, Step
from ds_adacc.program.backward_graph import BackwardGraph, BackwardNode, Edge, Gradient

INPUT, PARAMETER = 0, 1


def of(nbytes):
    return Gradient((nbytes,), torch.uint8)


def graph(*made, ends=None, nbytes=4):
    """The nodes that a block has made, after an input and a parameter. The last one gets the gradient of its output."""
    outside = BackwardNode("", (of(nbytes),)), BackwardNode("", (of(nbytes),), is_parameter=True)
    return BackwardGraph((*outside, *made), ends or (Edge(1 + len(made), 0),))


def node(op, *gives, gets=(4,), **others):
    """The node of an operator, or of a view that was made when so many operators had run (`2.5`: three)."""
    of_op = None if op is None or op % 1 else op
    return BackwardNode("", tuple(map(of, gets)), gives, of_op, -int(-op // 1), **others)


def passing(number, place=0):
    return Edge(number, place, is_passed_on=True)


def test_a_step_holds_what_it_gets_and_what_it_makes():
    of_block = graph(node(0, Edge(INPUT, 0)), node(1, Edge(2, 0)))
    memory = GradientMemory(of_block)
    assert of_block.bytes_of_outputs == 4 and memory.makers == [1, 0]
    assert memory.steps([0, 1]) == {1: Step(4, 8, 4), 0: Step(4, 8, 4)}


def test_what_is_passed_on_takes_nothing():
    memory = GradientMemory(graph(node(0, Edge(INPUT, 0)), node(1, passing(2))))
    assert memory.makers == [0]
    assert memory.steps([0, 1]) == {1: Step(4, 4, 4), 0: Step(4, 8, 4)}


def test_a_sum_takes_the_place_of_what_was_there_before():
    memory = GradientMemory(graph(node(0, Edge(INPUT, 0)), node(1, Edge(2, 0)), node(2, Edge(3, 0), Edge(2, 0))))
    assert memory.steps([2, 1, 0]) == {2: Step(4, 12, 8), 1: Step(8, 12, 8), 0: Step(4, 8, 4)}


def test_a_sum_is_made_anew_while_another_gradient_shares_the_memory():
    """As of x + x: both terms get one gradient."""
    memory = GradientMemory(graph(node(0, passing(INPUT), passing(INPUT))))
    assert memory.steps([0]) == {0: Step(4, 4, 8)}


def test_a_sum_is_made_anew_of_a_view_of_a_larger_gradient():
    """As of a value that is joined with others, and then with others again."""
    terms = node(0, Edge(INPUT, 0)), node(1, Edge(INPUT, 0))
    joined = node(2, passing(2), passing(3), gets=(8,)), node(3, passing(2), passing(3), gets=(8,))
    memory = GradientMemory(graph(*terms, *joined, ends=(Edge(4, 0), Edge(5, 0))))
    steps = memory.steps([3, 2, 1, 0])
    assert steps[3] == Step(16, 16, 16)
    # The sum for the first term is made while both wholes are there, that for the second beside the first one.
    assert steps[2] == Step(16, 16, 24)
    assert steps[1] == Step(8, 12, 8)


def test_a_sum_is_made_anew_of_a_view_with_other_strides():
    """As of the weight of a linear layer that is called twice."""
    turned = Edge(PARAMETER, 0, is_passed_on=True, is_turned=True)
    layers = node(-0.5, turned), node(0, Edge(INPUT, 0), Edge(2, 0)), node(0.5, turned), node(1, Edge(3, 0), Edge(4, 0))
    assert GradientMemory(graph(*layers)).steps([1, 0]) == {1: Step(4, 12, 8), 0: Step(8, 16, 16)}


def test_a_view_copies_what_has_other_strides():
    """As of heads that are joined again. The copy is an ordinary tensor, to which others may be added."""
    heads = node(-0.5, passing(INPUT)), node(-0.5, passing(2)), node(0, Edge(3, 0, is_passed_on=True, is_turned=True))
    views = [replace(heads[0], kind="ViewBackward0"), replace(heads[1], kind="ViewBackward0")]
    memory = GradientMemory(graph(*views, heads[2]))
    assert memory.steps([0]) == {0: Step(4, 4, 8)} and memory.left == 4
    memory = GradientMemory(graph(node(-0.5, Edge(INPUT, 0)), views[1], heads[2], ends=(Edge(4, 0), Edge(2, 0))))
    assert memory.steps([0]) == {0: Step(8, 8, 12)}


def test_a_copy_lies_beside_what_others_still_hold():
    """As of scores that are the sum of a product, whose factors have turned views, and of something else."""
    turned = Edge(3, 0, is_passed_on=True, is_turned=True)
    view = replace(node(0.5, passing(2)), kind="ViewBackward0")
    product = node(0, Edge(INPUT, 0)), view, node(0.5, turned)
    memory = GradientMemory(graph(*product, node(1, passing(4), passing(INPUT))))
    assert memory.steps([1, 0]) == {1: Step(4, 4, 8), 0: Step(8, 12, 12)}


def test_a_node_of_whose_gradients_nobody_asks_for_any_takes_what_it_gets():
    assert GradientMemory(graph(node(0, None))).steps([0]) == {0: Step(4, 4, 0)}


def test_what_overlaps_is_added_up_by_numbers():
    """Two rows of three elements, of a tensor of four: the gradient of that, and a number for each element of both."""
    windows = replace(node(-0.5, Edge(INPUT, 0), gets=(6,)), kind="AsStridedBackward0")
    assert GradientMemory(graph(windows, node(0, Edge(2, 0), gets=(6,)))).steps([0]) == {0: Step(6, 12, 6 + 4 + 80)}


def test_a_parameter_lets_go_when_it_has_got_all():
    memory = GradientMemory(graph(node(0, Edge(PARAMETER, 0)), node(1, Edge(2, 0), Edge(PARAMETER, 0))))
    assert memory.steps([1, 0]) == {1: Step(4, 12, 8), 0: Step(8, 12, 8)}
    memory = GradientMemory(graph(node(0, Edge(INPUT, 0)), node(1, Edge(2, 0), Edge(PARAMETER, 0))))
    assert memory.steps([1, 0]) == {1: Step(4, 12, 8), 0: Step(4, 8, 4)}


def test_a_smaller_gradient_is_the_sum_of_what_arrives_unless_it_is_a_part_of_it():
    for is_whole, step in ((True, Step(8, 12, 4)), (False, Step(8, 8, 8))):
        small = Edge(2, 0, is_passed_on=True, is_whole=is_whole)
        memory = GradientMemory(graph(node(0, Edge(INPUT, 0)), node(1, small, gets=(8,))))
        assert memory.steps([1, 0])[1] == step
        assert memory.makers == [0], "whatever the sizes, an operator makes gradients or does not"


@pytest.mark.parametrize(("makes_zeros", "during"), [(False, 12), (True, 16)])
def test_zeros_take_the_place_of_what_does_not_arrive(makes_zeros, during):
    split = node(1, Edge(INPUT, 0), gets=(4, 4), makes_zeros=makes_zeros)
    (step,) = GradientMemory(graph(split, ends=(Edge(2, 1),), nbytes=8)).steps([1]).values()
    assert step.during == during


def test_what_views_take_counts_after_the_operator_before():
    """A slice of an input that was made after one operator had run: the step of the second comes before its own."""
    cut = node(0.5, Edge(INPUT, 0))
    memory = GradientMemory(graph(node(0, Edge(INPUT, 0)), cut, node(1, Edge(3, 0)), node(2, Edge(4, 0)), nbytes=8))
    assert memory.steps([2, 1, 0]) == {2: Step(4, 8, 4), 1: Step(4, 8, 12), 0: Step(8, 8, 8)}


def test_what_comes_before_the_first_operator_asked_for_counts_for_it():
    memory = GradientMemory(graph(node(0, Edge(INPUT, 0)), node(1, Edge(2, 0), gets=(16,))))
    assert memory.steps([0]) == {0: Step(4, 20, 4)}


def test_an_operator_without_a_node_has_the_step_of_the_next_one():
    memory = GradientMemory(graph(node(0, Edge(INPUT, 0)), node(2, Edge(2, 0), Edge(INPUT, 0))))
    assert memory.steps([2, 1, 0]) == {2: Step(4, 12, 8), 1: Step(8, 12, 0), 0: Step(8, 12, 8)}


def test_without_a_graph_there_are_no_gradients():
    memory = GradientMemory(BackwardGraph())
    assert BackwardGraph().bytes_of_outputs == 0 and memory.makers == []
    assert memory.steps([3]) == {3: Step(0, 0, 0)}
