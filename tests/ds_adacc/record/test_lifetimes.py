"""Until when the program keeps in forward what its operators make: what variables hold, and nothing else."""

import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from recorded import record
from torch import nn

from ds_adacc import planner
from ds_adacc.planner.simulate import forward_timeline
from ds_adacc.profile.block_graph import block_graph
from ds_adacc.profile.memory_trace import MemoryTrace
from ds_adacc.record.frames import renew_copied_variables, run_recorded

SIZE = 1 << 12


def x():
    return torch.randn(4, SIZE, requires_grad=True)


def alive_until(block, *args):
    """By operator, the last one to run while the program keeps what it has made."""
    recording = record(block, args or (x(),), {})
    made = (value for value in recording.values if value.origin == "made" and not value.overwritten)
    return [value.alive_until for value in made]


def rebound(x):
    x = x.sin()
    x = x.exp()
    x = x.tanh()
    return x.cos()


def kept(x):
    first = x.sin()
    second = first.exp()
    third = second.tanh()
    return third.cos()


def deleted(x):
    first = x.sin()
    second = first.exp()
    del first
    return second.tanh().cos()


def inner(x):
    first = x.sin()
    return first.exp()


def within_functions(x):
    return inner(inner(x))


def kept_view(x):
    part = x.sin()[:1]
    return part.exp().tanh().cos()


def in_place(x):
    y = x.sin()
    y.mul_(2)
    z = y.exp()
    return z.tanh()


def in_a_loop(x):
    kept = []
    for _ in range(3):
        x = x.sin()
        kept.append(x)
    return sum(kept[1:], x * 0)


def in_a_comprehension(x):
    first, _ = [part.exp() for part in x.sin().chunk(2)]
    return first.tanh()


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (rebound, [1, 2, 3, 3]),
        (kept, [3, 3, 3, 3]),
        (deleted, [1, 3, 3, 3]),
        (within_functions, [1, 3, 3, 3]),
        (kept_view, [3, 2, 3, 3]),
        (in_place, [3, 3, 3]),
        (in_a_loop, [5, 5, 5, 5, 5, 5]),
        (in_a_comprehension, [2, 3, 3, 3]),
    ],
)
def test_a_value_is_alive_as_long_as_a_variable_holds_it(block, expected):
    assert alive_until(block) == expected


class Keeping(nn.Module):
    """What it keeps in an attribute outlives its forward."""

    def forward(self, x):
        self.seen = x.sin()
        return self.seen.exp().tanh()


def test_an_attribute_keeps_to_the_end():
    assert alive_until(Keeping()) == [2, 2, 2]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 2
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_what_a_function_returns_is_alive_as_long_as_a_variable_holds_it():
    assert alive_until(lambda x: Doubled.apply(x).exp().tanh()) == [1, 2, 2]

    def named(x):
        y = Doubled.apply(x)
        return y.exp().tanh()

    assert alive_until(named) == [2, 2, 2]


def test_a_copy_of_variables_in_a_frame_is_renewed():
    """To read them has Python make one, before 3.13."""

    def block():
        y = torch.ones(3)
        seen = weakref.ref(y)
        assert "y" in sys._getframe().f_locals
        del y
        renew_copied_variables()
        return seen()

    assert run_recorded(SimpleNamespace(run=block)) is None


def test_a_block_that_was_recorded_leaves_no_variables_behind(uncollected):
    """Copies of variables are left in frames. A copy that held its own frame would stay."""
    seen = []

    def block(x):
        y = x.sin()
        seen.append(weakref.ref(y))
        return y.exp().tanh()

    record(block, (x(),), {})
    assert seen[0]() is None


@pytest.mark.parametrize("block", [rebound, kept, deleted, within_functions, kept_view, in_place, in_a_loop, Keeping()])
def test_the_bytes_predicted_in_forward_are_those_that_are_taken(block):
    """If nothing is stored. (The input is there before.)"""
    given = x()
    graph = block_graph(record(block, (given,), {}))
    nothing = planner.Policy((None,) * len(graph.values))
    profile = planner.Profile(graph, (0.0,) * len(graph.ops), ((),) * len(graph.values))
    if isinstance(block, Keeping):
        del block.seen
    stored = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda none: none)
    with MemoryTrace(torch.device("cpu")) as trace, stored:
        block(given)
    assert 0 <= trace.peak - (max(forward_timeline(profile, nothing)) - given.nbytes) < 64  # numbers take a few bytes
