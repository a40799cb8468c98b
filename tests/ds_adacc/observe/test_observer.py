"""What calls hold between forward and backward, as it is counted and as it was planned."""

import pytest
import torch
import zoo
from torch import nn

from ds_adacc.config import load
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
