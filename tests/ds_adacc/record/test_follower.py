"""Code that ran at no recorded size: what it reads is guarded, and where that is not possible, nothing is replayed."""

import random

import pytest
import torch
import zoo
from any_size import Training
from torch import nn

RECORDED, LONG = (16, 24, 40, 48), 64


class Settings:
    scale = 1.0  # as the constant of shorter lengths: the program is the same
    scales = torch.ones(())


def is_long(x):
    return x.shape[1] > LONG


def scale_of_long():
    return Settings.scale


def draw():
    return random.random()


def drawn(x):
    return x * (draw() if is_long(x) else 1.0)


def scaled(x):
    return x * (scale_of_long() if is_long(x) else 1.0)


def scaled_by_tensor(x):
    return x * (Settings.scales if is_long(x) else 1.0)


class Block(nn.Module):
    def __init__(self, kernel):
        super().__init__()
        self.up, self.down = nn.Linear(zoo.WIDTH, 2 * zoo.WIDTH), nn.Linear(2 * zoo.WIDTH, zoo.WIDTH)
        self.kernel = kernel

    def forward(self, x):
        hidden = self.kernel(torch.tanh(self.up(x)))
        return x + self.down(torch.sin(torch.tanh(hidden)))


def operator(compute):
    @torch.library.custom_op(f"test_follower::{compute.__name__}", mutates_args=())
    def kernel(x: torch.Tensor) -> torch.Tensor:
        return compute(x)

    kernel.register_fake(torch.empty_like)
    kernel.register_autograd(lambda ctx, gradient: gradient * 1.0)
    return kernel


class Computing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, compute):
        return compute(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.0, None


def function(compute):
    return lambda x: Computing.apply(x, compute)


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    monkeypatch.setattr(Settings, "scale", 1.0)


def test_what_a_branch_reads_that_no_recording_took_is_guarded():
    runs = Training(lambda: Block(scaled))
    for time in (*RECORDED, 120, 16, 136):
        runs.compare(time)
    recordings = runs.runtime.recordings
    Settings.scale = 2.0
    for time in (120, 136, 120, 144, 16):
        runs.compare(time)
    assert runs.runtime.recordings > recordings


@pytest.mark.parametrize("make", [operator, function])
def test_what_a_kernel_reads_at_other_sizes_alone_must_be_the_same_when_it_is_replayed(make):
    kernel = make(scaled)
    runs = Training(lambda: Block(kernel))
    for time in RECORDED:
        runs.compare(time)

    x = torch.randn(2, 120, zoo.WIDTH, requires_grad=True)
    y = through(runs.blocks, x, runs.runtime.checkpoint)
    Settings.scale = 2.0
    with pytest.raises(
        RuntimeError, match=r"cannot be replayed: .*Settings\.scale, which its forward reads, has changed"
    ):
        y.square().sum().backward()


@pytest.mark.parametrize("make", [operator, function])
def test_a_kernel_that_draws_of_pythons_generator_at_other_sizes_alone_is_not_replayed_there(make):
    kernel = make(drawn)
    runs = Training(lambda: Block(kernel))
    for time in (*RECORDED, 120, 120, 136, 16, 120, 111):
        zoo.assert_same_bits(*seeded(runs, time))


def seeded(runs, time):
    """The gradients of plain autograd and ours, from the same numbers of Python's generator."""
    torch.manual_seed(time)
    x = torch.randn(2, time, zoo.WIDTH, requires_grad=True)

    def gradients(call):
        random.seed(time)
        return zoo.gradients(runs.blocks, (x,), {}, lambda x: through(runs.blocks, x, call))

    exact, found = gradients(lambda block, x: block(x)), gradients(runs.runtime.checkpoint)
    runs.runtime.controller.end_backward()
    runs.adacc.end_step()
    return exact, found


def through(blocks, x, call):
    for block in blocks:
        x = call(block, x)
    return x


@pytest.mark.parametrize("make", [operator, function])
def test_a_kernel_that_reads_another_tensor_at_other_sizes_alone_is_not_replayed_there(make, monkeypatch):
    monkeypatch.setattr(Settings, "scales", torch.ones(()))
    kernel = make(scaled_by_tensor)
    runs = Training(lambda: Block(kernel))
    for time in (*RECORDED, 120, 136, 120):
        torch.manual_seed(time)
        x = torch.randn(2, time, zoo.WIDTH, requires_grad=True)
        (expected,) = torch.autograd.grad(through(runs.blocks, x, lambda block, x: block(x)).square().sum(), x)
        y = through(runs.blocks, x, runs.runtime.checkpoint)
        Settings.scales.add_(1.0)
        (found,) = torch.autograd.grad(y.square().sum(), x)
        assert torch.equal(expected, found)
        runs.runtime.controller.end_backward()
        runs.adacc.end_step()
