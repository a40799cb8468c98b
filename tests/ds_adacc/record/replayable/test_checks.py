"""Checks of torch's that only raise an error read data, but decide nothing: what follows is recomputed."""

import functools

import pytest
import torch
import zoo
from recomputing import recomputing
from recorded import record
from torch import nn

from ds_adacc.program.refusals import TAINTED


class Checked(nn.Module):
    """Checks what it is given, as the deformable attention of RT-DETR checks the sizes of its feature maps."""

    def __init__(self, check):
        super().__init__()
        self.check, self.layer = check, nn.Linear(8, 8)

    def forward(self, x):
        return self.check(self.layer(x)).sin().exp()


def fails_below_zero(x):
    torch._check_tensor_all_with(ValueError, x.detach().abs() >= 0, lambda: f"the largest is {x.max().item()}")
    torch._check_tensor_all(x.detach().sum() != 0.5)
    return x.tanh()


def catches(x):
    try:
        torch._check_tensor_all(x.detach().mean() > 0)
        return x.tanh()
    except RuntimeError:
        return x.cos()


def batch(sign=1.0):
    return (sign * torch.rand(4, 8)).requires_grad_()


def test_what_follows_a_check_is_recomputed():
    recording = record(Checked(fails_below_zero), (batch(),), {})
    assert recording.data_read_at is None
    assert all(op.replayable for op in recording.ops if op.short_name in ("tanh", "sin", "exp"))


@pytest.mark.parametrize("first", [1.0, -1.0], ids=["first it passes", "first it fails"])
def test_what_follows_a_check_whose_error_the_block_catches_is_not(first):
    work, block = recomputing(), Checked(catches)
    nn.init.eye_(block.layer.weight)
    nn.init.zeros_(block.layer.bias)
    for sign in (first, -first):
        x = batch(sign)
        zoo.assert_exact(block, (x,), {}, functools.partial(work.checkpoint, block))
    assert work.recordings == 1
    recording = record(block, (batch(first),), {})
    assert recording.data_read_at is not None and recording.ops[-1].refusal == TAINTED


def test_a_check_that_fails_raises_its_error_and_later_calls_run_as_before():
    work, block = recomputing(), Checked(fails_below_zero)
    for step in range(4):
        x = batch()
        if step == 2:
            with pytest.raises(ValueError, match="the largest is"):
                work.checkpoint(block, torch.full((4, 8), float("nan"), requires_grad=True))
        zoo.assert_exact(block, (x,), {}, functools.partial(work.checkpoint, block))
