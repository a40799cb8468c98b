"""Offloading under a runtime: host memory is there before the step that needs it, and each call moves the copies on."""

import torch
import zoo
from fake_transfer import FakeTransfer
from torch import nn

from ds_adacc.config import load
from ds_adacc.execute.host_offload import Prefetcher
from ds_adacc.execute.input_placement import InputPlacement
from ds_adacc.planner import OFFLOAD
from ds_adacc.runtime.runtime import Runtime

SIZE = 2 * 9 * zoo.WIDTH * 4  # bytes of a block's input


def test_host_memory_is_reserved_between_steps_and_copies_end_in_order(monkeypatch):
    torch.manual_seed(0)
    blocks = nn.ModuleList(zoo.GPTBlock(dropout=0.0) for _ in range(3))
    x = torch.randn(2, 9, zoo.WIDTH, requires_grad=True)
    runtime, transfer = Runtime(load({"adacc": {"memory_budget": 1.0, "codecs": "none"}})), FakeTransfer()

    def run(first):
        h = first
        for block in blocks:
            h = runtime.checkpoint(block, h)
        return h

    expected = torch.autograd.grad(blocks[2](blocks[1](blocks[0](x))).sum(), [x, *blocks.parameters()])
    for _ in range(3):
        run(x).sum().backward()
    # Only inputs of blocks after the first are given to the host, which is where a GPU's would go.
    monkeypatch.setattr(InputPlacement, "store", lambda self, value: OFFLOAD if value.origin == "input" else "retain")
    monkeypatch.setattr(InputPlacement, "held_bytes", lambda self, value: 0)
    runtime._binder._prefetcher = Prefetcher(transfer)
    runtime.controller.hold_inputs(InputPlacement(on_host=True))
    assert transfer.log == [("reserve", [SIZE] * 3)]
    output = run(x)
    assert transfer.log[1:] == [("out", 0), ("out", 1), ("drop", 0), ("out", 2)]
    gradients = torch.autograd.grad(output.sum(), [x, *blocks.parameters()])
    assert all(map(torch.equal, expected, gradients))
    assert transfer.log[5:] == [("take", 2), ("back", 0), ("take", 1), ("take", 0)]
