"""What a replay says of a parameter that ZeRO-3 has partitioned away; what it calls an operator with, and under."""

from contextlib import contextmanager

import pytest
import torch
import zoo
from recomputing import recomputing
from torch import nn

from ds_adacc.program.arguments import Template
from ds_adacc.program.replay import live


def partitioned(**attributes):
    """A parameter as ZeRO-3 leaves it when it has released its data."""
    parameter = nn.Parameter(torch.empty(0))
    parameter.ds_id, parameter.ds_numel, parameter.ds_shape = 7, 12, torch.Size((3, 4))
    vars(parameter).update(attributes)
    return parameter


def test_a_block_that_is_no_leaf_module_should_become_one():
    with pytest.raises(
        RuntimeError, match=r"parameter 7 of shape \(3, 4\) is partitioned away .* a ZeRO-3 leaf module"
    ):
        live(partitioned())


def test_a_leaf_module_is_released_after_its_first_backward():
    with pytest.raises(RuntimeError, match="supports no second backward of one forward") as error:
        live(partitioned(ds_z3_leaf_module=nn.Linear(4, 3)))
    assert "initialize" not in str(error.value)


def test_what_was_empty_from_the_start_is_live():
    assert live(nn.Parameter(torch.empty(0))).numel() == 0


def test_a_function_may_write_to_the_lists_it_is_given():
    template = Template(([1, 2], (3, [4])), (("dims", [5]),))
    (first, (_, second)), kwargs = template.filled(None)
    for given in (first, second, kwargs["dims"]):
        given.append(6)
    assert template.filled(None) == ([[1, 2], (3, [4])], {"dims": [5]})


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Thirds(nn.Module):
    """Numbers whose dtype is torch's default: of whole numbers, and of nothing but a length."""

    def __init__(self, dtype):
        super().__init__()
        self.linear, self.dtype = nn.Linear(zoo.WIDTH, zoo.WIDTH), dtype

    def forward(self, x):
        with default_dtype(self.dtype):
            thirds = (10 * x).int() / 3
            steps = torch.linspace(0, 1, x.shape[-1])
            factor = (thirds.sin() + steps.cos()).float()
        return torch.tanh(self.linear(x) * factor)


@pytest.mark.parametrize("in_backward", (torch.float32, torch.float64))
@pytest.mark.parametrize("in_forward", (torch.float32, torch.float64))
def test_what_follows_the_default_dtype_is_replayed_under_that_of_forward(in_forward, in_backward):
    work, block = recomputing(), Thirds(in_forward)
    x = torch.randn(2, 9, zoo.WIDTH, requires_grad=True)
    found = []
    for call in (lambda block, x: block(x), work.checkpoint):
        block.zero_grad()
        x.grad = None
        loss = call(block, x).square().sum()
        with default_dtype(in_backward):
            loss.backward()
        found.append((loss.detach(), {"x": x.grad, "weight": block.linear.weight.grad}))
    zoo.assert_same_bits(*found)
    [variant] = work.blocks.all()[0].variants()
    replayed = {op.short_name for op in variant.recording.ops if op.replayable}
    assert variant.bound.segments and {"sin", "cos", "div", "linspace"} <= replayed
