"""On a CUDA device: in a steady step the host never waits for the device."""

import pytest
import torch
import zoo

from ds_adacc.config import load
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.steps.step_schedule import Purpose

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SECTIONS = {
    "lossless": {"codecs": "none", "offload": False},
    "lossy": {"codecs": "paper", "max_gradient_error": None, "offload": False},
    "offload": {"codecs": "none", "offload": True},
    "lossy, offload": {"codecs": "paper", "max_gradient_error": None, "offload": True},
}


@pytest.mark.parametrize("budget", [0.7, 0.5])
@pytest.mark.parametrize("section", SECTIONS)
def test_a_steady_step_has_no_synchronisation(section, budget):
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList(zoo.GPTBlock(512, 8) for _ in range(4)).cuda()
    x = torch.randn(8, 256, 512, device="cuda", requires_grad=True)
    runtime = Runtime(load({"adacc": {"memory_budget": budget, **SECTIONS[section]}}), has_engine=True)
    controller = runtime.controller

    def step():
        h = x
        for block in blocks:
            h = runtime.checkpoint(block, h)
        h.sum().backward()
        controller.end_backward()
        controller.end_step()

    while controller.plan is None or controller.step.purpose is not Purpose.RUN:
        step()
    step()
    while controller.step.purpose is not Purpose.RUN:
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
