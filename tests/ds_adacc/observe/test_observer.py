"""What calls hold between forward and backward, as it is counted and as it was planned."""

import pytest
import torch
import zoo
from torch import nn

from ds_adacc.config import load
from ds_adacc.observe.calibration import excesses
from ds_adacc.observe.step_profiler import Measured
from ds_adacc.runtime.runtime import Runtime


class Scaled(nn.Module):
    """Is given a parameter of the model: the model holds that, and ZeRO keeps it in the memory of many others."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(zoo.WIDTH, zoo.WIDTH)

    def forward(self, x, scale):
        return torch.tanh(self.fc(x) * scale)


# a view, as learned queries are: the same for each text of the batch
@pytest.mark.parametrize("given_as", [lambda it: it, lambda it: it.expand(3, zoo.WIDTH)], ids=["itself", "view"])
def test_a_parameter_among_the_arguments_is_not_held_by_the_calls(given_as):
    flat = torch.randn(100_000)
    scale, block = nn.Parameter(torch.empty(0)), Scaled()
    scale.data = flat[: zoo.WIDTH]
    runtime = Runtime(load({"adacc": {"memory_budget": 1.0, "codecs": "none"}}), has_engine=True)
    for _ in range(3):
        x = torch.randn(2, 3, zoo.WIDTH, requires_grad=True)
        zoo.loss_of(runtime.checkpoint(block, x, given_as(scale))).backward()
        runtime.controller.end_backward()
        runtime.controller.end_step()
    held = runtime.controller.observation.held
    assert held.observed == held.planned < flat.nbytes
    ((_, variant),) = runtime.blocks.variants()
    given = [value for value in variant.recording.values if value.origin == "input"]
    assert [value.owned for value in given] == [True, False]


class Wide(nn.Module):
    """Its backward first frees what is as large as the gradient of its weight, and then takes the most."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(256, 256)

    def forward(self, x):
        return x + self.fc(x.repeat(1, 4).exp().sin().unflatten(-1, (4, 256)).mean(1))


class Noisy(nn.Module):
    """Draws random numbers. Its forward takes more than its backward."""

    def forward(self, x):
        for _ in range(4):
            x = nn.functional.dropout(x, 0.1)
        return x * x.detach().repeat(1, 32).exp().mean()


@pytest.mark.parametrize(("make", "is_new"), [(Wide, True), (Wide, False), (Noisy, True)])
def test_what_a_step_is_observed_to_take_is_what_was_planned(make, is_new):
    """A new gradient of a parameter is not taken for an activation of its size, nor a generator's state for an input.

    The first backward of a step leaves such gradients. Others add to them, and let go of what they have added.
    """
    blocks = [make() for _ in range(3)]
    runtime = Runtime(load({"adacc": {"memory_budget": 1.0, "codecs": "none"}}), has_engine=True)
    plans = []
    for _ in range(3):
        for parameter in (each for block in blocks for each in block.parameters()):
            parameter.grad = None if is_new else torch.zeros_like(parameter)
        x = torch.randn(256, 256, requires_grad=True) * 1.0
        for block in blocks:
            x = runtime.checkpoint(block, x)
        x.sum().backward()
        runtime.controller.end_backward()
        runtime.controller.end_step()
        plans.append(runtime.controller.plan)
    peak = runtime.controller.observation.peak
    assert peak.observed == pytest.approx(peak.planned, abs=4096)
    assert plans[0] is plans[-1], "nothing is to be corrected"


def test_where_the_forward_had_run_before_the_backward_is_compared_alone():
    """As in a tracking step, which records a call of each block type again: its forward takes what recording does."""
    block = Noisy()
    runtime = Runtime(load({"adacc": {"memory_budget": 1.0, "codecs": "none"}}))
    for _ in range(2):
        runtime.checkpoint(block, torch.randn(64, 256, requires_grad=True)).sum().backward()
    ((digest, known),) = runtime.controller.agreement.known_types.items()
    (policy,) = set(known.policies)
    found = excesses([Measured(digest, policy, None, 1 << 30, None, None)], {digest: known})[digest]
    assert found.forward == 0 and found.backward > 0
    assert not excesses([Measured(digest, policy, None, None, None, None)], {digest: known})
