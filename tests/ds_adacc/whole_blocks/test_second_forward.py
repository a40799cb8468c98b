"""A second forward that begins when a gradient of the block's output arrives, before any saved tensor is asked for."""

import functools
import gc
import weakref
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
import zoo
from torch import nn

from ds_adacc.program.slots import run_packed
from ds_adacc.python_state.closure import closure_of
from ds_adacc.record.block_call import BlockCall
from ds_adacc.whole_blocks.beginning import Beginning
from ds_adacc.whole_blocks.second_forward import SecondForward, nodes_of


class Block(nn.Module):
    """`events`: "forward" for each of its forwards, and "backward" for each time that its middle operator ran back."""

    def __init__(self, pack=lambda y: y):
        super().__init__()
        self.linear, self.pack, self.events = nn.Linear(4, 4), pack, []

    def forward(self, x):
        self.events.append("forward")
        h = self.linear(x).exp()
        h.register_hook(lambda _: self.events.append("backward"))
        return self.pack(h * 2)  # which saves nothing


@dataclass
class Output:
    y: torch.Tensor
    name: str = "y"


class State:
    """An argument that the program changes after the call."""


def called(block, x, *args):
    """The output of a call of which nothing is held, as `WholeCall` and `PlainCalls` make it."""
    run = functools.partial(block, x, *args)
    second = SecondForward("block", Beginning(BlockCall((), (), closure_of(block), run)), nullcontext, keeps=True)
    output = run_packed(second.slot, run)
    second.run_at_gradient_of(output, (x, *args))
    return output


def gradients(run, block, x):
    block.zero_grad()
    x.grad = None
    run().sum().backward()
    return [x.grad.clone(), *(parameter.grad.clone() for parameter in block.parameters())]


def data():
    torch.manual_seed(0)
    return torch.randn(3, 4, requires_grad=True)


@pytest.mark.parametrize(
    "pack, unpack",
    [
        (lambda y: y, lambda y: y),
        (lambda y: (y, None), lambda y: y[0]),
        (lambda y: {"y": [y]}, lambda y: y["y"][0]),
        (Output, lambda y: y.y),
        (lambda y: y.view(-1), lambda y: y),
        (lambda y: y.view(-1), lambda y: y.add_(1)),
        (lambda y: y, lambda y: y.mul_(3)),
        (lambda y: (y[:1], y[1:]), lambda y: torch.cat(y)),
    ],
)
def test_it_begins_before_the_block_runs_back_and_runs_once(pack, unpack):
    block, x = Block(pack), data()
    plain = gradients(lambda: unpack(block(x)), block, x)
    block.events.clear()
    ours = gradients(lambda: unpack(called(block, x)), block, x)
    assert block.events == ["forward", "forward", "backward"]
    zoo.assert_same(plain, ours)


def test_a_gradient_of_an_argument_that_it_returns_is_none_of_its_own():
    block, x = Block(), data()
    given = x * 1
    y, same = called(lambda given: (block(given), given), given)
    assert nodes_of((y, same)) - nodes_of((given,)) == {y.grad_fn}
    same.sum().backward(retain_graph=True)
    assert block.events == ["forward"]


def test_it_keeps_what_it_has_made_for_a_backward_that_asks_twice():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.exp())
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0] + ctx.saved_tensors[0]

    block, x = Block(Twice.apply), data()
    plain = gradients(lambda: block(x), block, x)
    block.events.clear()
    zoo.assert_same(plain, gradients(lambda: called(block, x), block, x))
    assert block.events.count("forward") == 2


def test_a_second_backward_finds_it_all():
    block, x = Block(), data()
    y = called(block, x).sum()
    first, second = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert block.events == ["forward", "forward", "backward", "backward"]


def test_a_difference_that_shows_within_torchscript_has_its_own_text():
    def mix(x):
        return torch.relu(x @ x.t()) ** 2 * torch.sigmoid(x[:, :1])

    y = called(Block(torch.jit.script(mix)), data())
    with pytest.raises(
        RuntimeError, match=r"block block reads data .* second forward saves a tensor of shape .* where"
    ):
        y.sum().backward()


def test_after_backward_nothing_holds_the_arguments():
    block, x = Block(), data()
    given = (x * 1).detach()
    gone = weakref.ref(given)
    y = called(block, given)
    del given
    assert gone() is not None
    y.sum().backward()
    assert gone() is None, "though the output lives"


def test_an_argument_that_is_given_the_output_makes_no_cycle():
    """Through more than one node of the graph, Python's collector would not see it."""
    blocks, x, gone = [Block(lambda y: y + 1) for _ in range(3)], data(), []
    for block in blocks:
        state = State()
        x = called(lambda x, state, block=block: block(x), x, state)
        state.output = x
        gone.append(weakref.ref(state))
    x.sum().backward()
    del state, x
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3
