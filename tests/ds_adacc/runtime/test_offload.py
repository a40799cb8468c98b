"""Offloading under a runtime: host memory is there before the step that needs it, and each call moves the copies on."""

from dataclasses import replace
from types import SimpleNamespace

import torch
import zoo
from fake_transfer import FakeTransfer
from recorded import profile_of, record
from torch import nn

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.execute.host_offload import Prefetcher
from ds_adacc.execute.input_placement import InputPlacement
from ds_adacc.execute.variant import Variant
from ds_adacc.planner import OFFLOAD, is_codec, is_offloaded
from ds_adacc.profile.codec_maker import CodecMaker
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.steps.binder import Binder

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
    zoo.assert_same(expected, gradients)
    assert transfer.log[5:] == [("take", 2), ("back", 0), ("take", 1), ("take", 0)]


def test_payloads_are_offloaded_as_planned(monkeypatch):
    offered = CodecMaker.on_offer

    def on_offer(self, value, recording):
        names = offered(self, value, recording)
        return (*names, OFFLOAD) if names else names

    monkeypatch.setattr(CodecMaker, "on_offer", on_offer)
    # a link that could not take whole values beside so short a forward
    monkeypatch.setattr(CodecMaker, "byte_seconds", lambda self, device: (1e-9, 1e-9))
    torch.manual_seed(0)
    blocks = nn.ModuleList(zoo.GPTBlock(dropout=0.0) for _ in range(4))
    x = torch.randn(2, 9, zoo.WIDTH, requires_grad=True)
    section = {"memory_budget": 0.34, "codecs": {"linear": "group", "gelu": "group"}, "max_gradient_error": None}
    runtime, transfer = Runtime(load({"adacc": section}), has_engine=True), FakeTransfer()
    runtime._binder._prefetcher = Prefetcher(transfer)
    for _ in range(8):
        h = x
        for block in blocks:
            h = runtime.checkpoint(block, h)
        torch.autograd.grad(h.sum(), [x, *blocks.parameters()])
        runtime.controller.end_step()
    plan, seen = runtime.controller.plan, runtime.controller.observation
    (chosen,) = plan.policies.values()
    moved = [store for policy in chosen for store in policy.stores if is_offloaded(store)]
    assert any(map(is_codec, moved)) and plan.peak <= plan.budget
    assert seen.held.observed == seen.held.planned
    takes = sum(what == "take" for what, _ in transfer.log)
    assert takes and takes % len(moved) == 0


def test_a_call_too_small_to_offload_still_compresses():
    block, args, kwargs = zoo.example("gpt")
    recording = record(block, args, kwargs)
    codecs = CodecMaker(load({"adacc": {"codecs": {"gelu": "group"}, "group_size": 16, "backend": "reference"}}))
    (index,) = [v.index for v in recording.values if codecs.on_offer(v, recording)]
    retained = planner.retain_policy(profile_of(recording)).stores
    here, away = (planner.Policy((*retained[:index], s, *retained[index + 1 :])) for s in ("group", "offload group"))
    group = planner.CodecCost("group", 16, 0.0, 0.0, 0.1, 0, gradient_error=0.1)
    costs = [(group, planner.CodecCost.offload(64, 0.0, 0.0)) if v == index else () for v in range(len(retained))]
    larger = replace(profile_of(recording), codecs=tuple(costs))  # of a size at which the value may be offloaded
    binder, variant = Binder(codecs), Variant()
    variant.recording = recording
    binder.device = torch.device("cpu")
    for policy in (here, away):
        assert binder.has_all_losses(variant, policy, larger)
        bound = binder.bound_to_measure(variant, SimpleNamespace(capacity={}), policy)
        assert bound.policy == here
        assert binder._permitted(policy, variant) == here
