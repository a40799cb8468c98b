"""The cases of FairScale's tests of `checkpoint_wrapper` (facebookresearch/fairscale, tests/nn/checkpoint/
test_checkpoint_activations.py and test_checkpoint_activations_norm.py)."""

import copy

import pytest
import torch
from torch import nn


class Checkpointed(nn.Module):
    """What a wrapper is: a module that calls its inner module through `call`."""

    def __init__(self, inner, call):
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, *args, **kwargs):
        return self.call(self.inner, *args, **kwargs)


def stepped(model, loss):
    """Gradients, and parameters and buffers after a step of SGD."""
    model.zero_grad()
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return loss, gradients, list(model.state_dict().values())


def test_a_feed_forward_layer_with_dropout(peer):
    torch.manual_seed(0)
    ffn = nn.Sequential(nn.Linear(32, 128), nn.Dropout(0.5), nn.Linear(128, 32))
    head, x = nn.Linear(32, 1), torch.rand(2, 16, 32, requires_grad=True)

    def case(call):
        loss = head(Checkpointed(ffn, call)(x)).sum()
        return loss, torch.autograd.grad(loss, [x, *ffn.parameters(), *head.parameters()])

    peer.compare(case)


def test_small_layers_each_checkpointed(peer):
    torch.manual_seed(0)
    widths = [(4, 4, 4, 8), (8, 4, 4, 4), (4, 6, 8, 2)]
    stack = [nn.Sequential(*map(nn.Linear, row[:-1], row[1:])) for row in widths]
    x = torch.rand(60, 24, 4, requires_grad=True)

    def case(call):
        out = x
        for layer in stack:
            out = call(layer, out)
        return torch.autograd.grad(out.sum(), [x, *(p for layer in stack for p in layer.parameters())])

    peer.compare(case)


class TwoInputs(nn.Module):
    def __init__(self, wrapped, returns_both, call):
        super().__init__()
        torch.manual_seed(0)
        one, two = (nn.Sequential(nn.Conv2d(n, 5, 3), nn.ReLU(), nn.Conv2d(5, 5, 3)) for n in (1, 3))
        self.one = Checkpointed(one, call) if wrapped & 1 else one
        self.two = Checkpointed(two, call) if wrapped & 2 else two
        self.returns_both = returns_both

    def forward(self, x, other=None):
        one, two = self.one(x), self.two(other)
        return (one, two) if self.returns_both else one + two


@pytest.mark.matrix
@pytest.mark.parametrize("wrapped", [1, 2, 3])
@pytest.mark.parametrize("returns_both", [True, False])
def test_two_inputs_and_two_outputs(peer, wrapped, returns_both):
    x, other = torch.rand(2, 1, 8, 8, requires_grad=True), torch.rand(2, 3, 8, 8, requires_grad=True)

    def case(call):
        model = TwoInputs(wrapped, returns_both, call)
        outputs = model(x, other=other)
        loss = sum(out.sum() for out in outputs) if returns_both else outputs.sum()
        return loss, torch.autograd.grad(loss, [x, other, *model.parameters()])

    peer.compare(case)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm2d])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_update_their_statistics_once(peer, norm, dtype):
    """Recomputing a batch norm by a second forward would update its running statistics twice."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(3, 2), norm(2), nn.GELU()).to(dtype)
    models = []

    def case(call):
        model = copy.deepcopy(made)
        models.append(model)
        x = torch.rand(2, 2, 3, 2 if norm is nn.LayerNorm else 3, dtype=dtype, requires_grad=True)
        x = x.reshape(-1, 2, 2, 3) if norm is nn.LayerNorm else x
        return stepped(model, call(model, x).float().square().sum())

    peer.compare(case)
