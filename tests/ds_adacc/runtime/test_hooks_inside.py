"""A block that runs a backward in its forward runs the hooks of its inputs and parameters: they are part of it."""

import pytest
import torch
import zoo
from recomputing import recomputing
from torch import nn


class Forces(nn.Module):
    def __init__(self, kind="input"):
        super().__init__()
        self.energy, self.out, self.kind = nn.Linear(8, 8), nn.Linear(8, 8), kind

    def forward(self, x):
        of = x if self.kind == "input" else self.energy.weight
        (force,) = torch.autograd.grad(self.energy(x).sin().sum(), of, create_graph=True)
        return x + self.out((force * force).tanh())


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(x).tanh().exp()


def doubled(gradient):
    return gradient * 2.0


def tripled(gradient):
    return gradient * 3.0


def trained(block, call, hooks, of_parameter=False):
    """The gradients of steps in which the input, or the weight, has these hooks."""
    gradients = []
    for step, given in enumerate(hooks):
        torch.manual_seed(step)
        x = torch.randn(8, 8, requires_grad=True)
        handles = [(block.energy.weight if of_parameter else x).register_hook(hook) for hook in given]
        call(block, x).sum().backward()
        for handle in handles:
            handle.remove()
        gradients += [x.grad, *(each.grad.clone() for each in block.parameters() if each.grad is not None)]
        block.zero_grad()
    return gradients


def both(make, hooks, **options):
    """The gradients of plain autograd, ours, and the runtime."""
    torch.manual_seed(0)
    plain = trained(make(), lambda block, x: block(x), hooks, **options)
    torch.manual_seed(0)
    runtime = recomputing()
    return plain, trained(make(), runtime.checkpoint, hooks, **options), runtime


@pytest.mark.parametrize(
    "hooks",
    [
        [(), (), (doubled,), (), (doubled,)],
        [(doubled,), (doubled,), (), (tripled,), (doubled,)],
        [(doubled,), (doubled, doubled), (doubled,) * 3],
    ],
)
@pytest.mark.parametrize("kind", ["input", "weight"])
def test_other_hooks_than_those_recorded_give_the_gradients_of_plain_autograd(hooks, kind):
    plain, ours, runtime = both(lambda: Forces(kind), hooks, of_parameter=kind == "weight")
    zoo.assert_same(plain, ours)
    assert runtime.recordings == len(set(hooks))


def test_another_block_is_not_recorded_for_the_hooks_of_its_inputs():
    plain, ours, runtime = both(Plain, [(), (), (doubled,), (tripled, doubled)])
    zoo.assert_same(plain, ours)
    assert runtime.recordings == 1


def times(factor):
    return lambda gradient: gradient * factor


def test_hooks_of_one_code_are_told_apart_by_what_they_hold():
    hooks = [(times(2.0),), (times(3.0),), (), (times(2.0),)]
    plain, ours, runtime = both(Forces, hooks)
    zoo.assert_same(plain, ours)
    assert runtime.recordings == 3


class Sometimes(Forces):
    """Runs a backward within its forward for some batches only."""

    def forward(self, x, differentiates):
        return super().forward(x) if differentiates else x + self.out(x)


def test_a_block_whose_first_calls_run_no_backward():
    def call(of):
        numbers = iter(range(5))
        return lambda block, x: of(block, x, next(numbers) > 0)

    hooks = [(), (doubled,), (), (doubled,), ()]
    torch.manual_seed(0)
    plain = trained(Sometimes(), call(lambda block, *args: block(*args)), hooks)
    torch.manual_seed(0)
    zoo.assert_same(plain, trained(Sometimes(), call(recomputing().checkpoint), hooks))
