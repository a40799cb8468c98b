"""The index of each block in forward order, learnt from passes that may leave blocks out."""

import pytest

from ds_adacc.execute.block import Block
from ds_adacc.plan.forward_order import ForwardOrder, ForwardPass

BLOCKS = [Block(name) for name in "abcdef"]


def seen(names, digest="x", others=""):
    calls = [(digest, BLOCKS["abcdef".index(name)]) for name in names]
    calls += [("y", BLOCKS["abcdef".index(name)]) for name in others]
    return ForwardPass(tuple(calls), reversed=True)


def learned(*passes):
    """The blocks in the order that was learnt, and what the last pass has moved."""
    order, moved = ForwardOrder(), set()
    for each in passes:
        moved = order.learn(each, {"x", "y"})
    return "".join(order.names("x").values()), moved


@pytest.mark.parametrize(
    ("passes", "order", "moved"),
    [
        (["abc"], "abc", set()),
        (["abc", "abc"], "abc", set()),
        (["abc", "abcd"], "abcd", set()),
        (["acd", "abd"], "abcd", {"x"}),
        (["abcd", "bd"], "abcd", set()),
        (["bd", "ace"], "acebd", {"x"}),
        (["abc", "acb"], "acb", {"x"}),
        (["abc", "cb"], "cba", {"x"}),
    ],
)
def test_blocks_that_a_pass_leaves_out_keep_their_place(passes, order, moved):
    assert learned(*map(seen, passes)) == (order, moved)


def test_a_block_that_runs_as_another_type_now_gives_up_its_place():
    assert learned(seen("cd"), seen("ab", others="c")) == ("abd", {"x"})


def test_larger_inputs_follow_the_order_of_smaller_ones_if_they_have_as_many_calls():
    order = ForwardOrder()
    order.learn(seen("ab", others="c"), {"x", "y"})
    order.copy_order({"large": 2, "y": 1}, {"large": "x", "y": "y"})
    assert order.orders[frozenset({"large", "y"})] == ("large", "large", "y")
    order.copy_order({"larger": 4, "y": 1}, {"larger": "x", "y": "y"})
    order.copy_order({"unknown": 2}, {"unknown": "z"})
    order.copy_order({"one": 2, "other": 2}, {"one": "x", "other": "x"})
    assert order.orders.keys() == {frozenset({"x", "y"}), frozenset({"large", "y"})}


@pytest.mark.parametrize(("calls", "blocks"), [("abc", 3), ("aabb", 2), ("abab", 2), ("aab", 1), ("", 1)])
def test_blocks_share_the_calls_if_each_has_as_many(calls, blocks):
    assert seen(calls, others="def").equal_blocks("x") == blocks
