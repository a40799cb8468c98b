"""The bytes that the planner expects at each backward step are those that backward takes."""

import pytest
import torch
from recorded import captured

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.profile.codec_maker import CodecMaker
from ds_adacc.profile.measure import measure
from ds_adacc.profile.memory_trace import MemoryTrace

SIZE = 1 << 14
CPU = torch.device("cpu")


def one_residual(x):
    return x + x.sin().exp()


def two_residuals(x):
    y = x + x.sin().exp()
    return y + y.cos().exp()


def chain_of_sums(x):
    return x + (x.sin() + (x.cos() + x.exp().sin()))


def difference(x):
    return x.exp() - x.sin().exp()


def scaled(x):
    return torch.add(x.exp(), x.sin().exp(), alpha=2)


def value_plus_itself(x):
    y = x.sin()
    return y + y


def value_with_three_readers(x):
    y = x.sin()
    return y.exp() + y.cos() + y


def broadcast(x):
    return x.sin() + x[:1].exp()


def in_place(x):
    y = x.sin()
    y += x.cos()
    return y.exp()


@pytest.mark.parametrize(
    "block",
    [
        one_residual,
        two_residuals,
        chain_of_sums,
        difference,
        scaled,
        value_plus_itself,
        value_with_three_readers,
        broadcast,
        in_place,
    ],
)
def test_backward_takes_what_is_expected(block):
    leaf = torch.randn(4, SIZE, requires_grad=True)
    found = captured(block, leaf * 1.0)
    profile = measure(found.recording, found, CodecMaker(load({"adacc": {"codecs": "none"}})))
    run = planner.simulate(profile, planner.retain_policy(profile))
    weight = torch.randn(4, SIZE)
    with MemoryTrace(CPU) as trace:
        x = leaf * 1.0
        loss = (block(x) * weight).sum()  # with a gradient that nobody keeps
        began = trace.mark()
        (gradient,) = torch.autograd.grad(loss, x)
        ended = trace.mark()
    of_loss = 4
    assert trace.growth(began, ended) - of_loss == max(run.timeline) - run.held
    assert gradient.shape == leaf.shape
