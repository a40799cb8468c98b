"""Blocks of TorchScript, checkpointed as the program asks: their forwards save other tensors when they run again."""

from dataclasses import dataclass

import pytest
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as deepspeeds
from experts import configured
from torch import nn

from ds_adacc import checkpointing
from ds_adacc.checkpointing import checkpoint

CALLS = 4


@pytest.fixture(autouse=True)
def runtime():
    yield configured()
    checkpointing.registry.reset()


def mixing():
    """A block of a class of its own: modules of one class share what TorchScript has learned of its calls."""

    class Mixing(torch.jit.ScriptModule):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        @torch.jit.script_method
        def forward(self, x, first):
            x = x + self.down(torch.relu(self.up(x)) ** 2)
            return x, first * torch.sigmoid(x)

    torch.manual_seed(0)
    return nn.ModuleList([Mixing(), nn.Dropout(0.2)])


def trained(call, requires_grad=True):
    """What the calls return, and the gradients of the input and the parameters, from TorchScript's first call on."""
    block, found = mixing(), []
    script, dropout = block

    def run(x, given, scale=1.0):
        y, first = script(x, given["first"])
        return {"y": dropout(y) * scale, "pair": (first, None)}

    block.forward = run
    for seed in range(CALLS):
        torch.manual_seed(seed)
        x, first = (torch.randn(2, 3, 8, requires_grad=requires_grad) for _ in range(2))
        block.zero_grad()
        out = call(block, x, {"first": first})
        (out["y"].square().sum() + out["pair"][0].sum()).backward()
        found += [out["y"].detach(), x.grad, first.grad, *[parameter.grad for parameter in block.parameters()]]
    return found


def by_deepspeed(block, x, given):
    """DeepSpeed's checkpoint takes tensors only, and returns a tuple of them."""

    def flat(x, first):
        out = block(x, {"first": first}, scale=2.0)
        return out["y"], out["pair"][0]

    y, first = deepspeeds.checkpoint(flat, x, given["first"])
    return {"y": y, "pair": (first, None)}


def test_gradients_have_the_bits_of_those_under_deepspeeds_checkpoint():
    ours = trained(lambda block, x, given: checkpoint(block, x, given, scale=2.0))
    assert all(map(torch.equal, ours, trained(by_deepspeed)))


def test_parameters_learn_where_no_argument_requires_a_gradient():
    ours = trained(lambda block, x, given: checkpoint(block, x, given), requires_grad=False)
    plain = trained(lambda block, x, given: block(x, given), requires_grad=False)
    assert [gradient is None for gradient in ours] == [gradient is None for gradient in plain]
    pairs = [(a, b) for a, b in zip(ours, plain, strict=True) if a is not None]
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)  # TorchScript's first backward is another


def test_a_frozen_block_needs_no_gradient():
    block = mixing().requires_grad_(False)
    out = checkpoint(block[0], torch.randn(2, 3, 8), torch.randn(2, 3, 8))
    assert not any(tensor.requires_grad for tensor in out)


def test_the_first_forward_writes_to_the_lists_that_it_is_given():
    block, seen = mixing(), []

    def run(x, into):
        y, _ = block[0](x, x)
        into.append(y.detach())
        return y

    block.forward = run
    out = checkpoint(block, torch.randn(2, 3, 8, requires_grad=True), seen)
    out.sum().backward()
    (kept,) = seen  # the second forward has written to another
    assert torch.equal(kept, out)


def test_tensors_that_are_returned_in_an_object_are_refused():
    @dataclass
    class Output:
        y: torch.Tensor

    block = mixing()
    block.forward = lambda x: Output(block[0](x, x)[0])
    with pytest.raises(RuntimeError, match=r"TorchScript returns tensors in an object \(.*Output\)"):
        checkpoint(block, torch.randn(2, 3, 8, requires_grad=True))
