"""A block that runs a backward in its forward runs the hooks of its inputs and parameters: they are part of it."""

import pytest
import torch
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
        gradients += [x.grad, *(parameter.grad.clone() for parameter in block.parameters())]
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
    assert all(map(torch.equal, plain, ours))
    assert runtime.recordings == len(set(hooks))


def test_another_block_is_not_recorded_for_the_hooks_of_its_inputs():
    plain, ours, runtime = both(Plain, [(), (), (doubled,), (tripled, doubled)])
    assert all(map(torch.equal, plain, ours))
    assert runtime.recordings == 1
