"""What a profile is made of: what an offload costs, and how much time may be hidden beside."""

import gc

import torch
import zoo
from recorded import captured
from torch import nn

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.profile import codec_costs, measure, operator_costs
from ds_adacc.profile.block_graph import OperatorCost
from ds_adacc.profile.codec_maker import CodecMaker
from ds_adacc.profile.memory_trace import MemoryTrace
from ds_adacc.program.geometry import Geometry
from ds_adacc.program.recording import RecordedValue

CPU = torch.device("cpu")


def maker(**section):
    return CodecMaker(load({"adacc": section}))


def test_the_offload_costs_its_copies(monkeypatch):
    value = RecordedValue(0, "gelu0", "made", Geometry((512, 512), (512, 1), torch.float32, 0), device="cuda")
    codecs = maker()
    monkeypatch.setattr(codecs, "byte_seconds", lambda device: (0.5, 0.25))
    cost = codec_costs._cost(planner.OFFLOAD, value, torch.zeros(1), codecs, measure.Timer(CPU))
    assert cost == planner.CodecCost.offload(1 << 20, 2.0**19, 2.0**18)


def test_copies_hide_behind_the_operators_measured(monkeypatch):
    costs = OperatorCost(replay_seconds=0.5, backward_seconds=0.25)
    monkeypatch.setattr(measure, "operator_costs", lambda recording, *_: (costs,) * len(recording.ops))
    found = captured(zoo.GPTBlock(dropout=0.0), torch.randn(2, 9, zoo.WIDTH, requires_grad=True))
    profile = measure.measure(found.recording, found, maker(codecs="none"))
    ops = len(found.recording.ops)
    assert profile.op_seconds == (0.5,) * ops
    assert profile.overlap_seconds == (0.5 * ops, 0.25 * ops)


def test_garbage_that_python_collects_meanwhile_is_not_taken_for_the_operators_memory(monkeypatch):
    def collected(*arguments, replay=operator_costs.replay):
        if gc.isenabled():  # as Python may at any moment
            gc.collect()
        return replay(*arguments)

    found = captured(nn.Sequential(nn.Tanh(), nn.Sigmoid()), torch.randn(8, requires_grad=True))
    monkeypatch.setattr(operator_costs, "replay", collected)
    with MemoryTrace(CPU):  # a profiler sees the release of what one has seen allocated
        garbage = [torch.zeros(1000)]
    garbage.append(garbage)
    del garbage
    profile = measure.measure(found.recording, found, maker(codecs="none"))
    assert [op.workspace_bytes for op in profile.graph.ops] == [0, 0]
    assert gc.isenabled()


def test_a_lossy_codec_is_lossy_for_zeros_too():
    """A gate that begins at zero, as adaLN-Zero's and LoRA's do, is not zero for long."""
    block = zoo.GPTBlock(dropout=0.0)
    nn.init.zeros_(block.fc1.weight)
    nn.init.zeros_(block.fc1.bias)
    found = captured(block, torch.randn(2, 32, zoo.WIDTH, requires_grad=True))
    profile = measure.measure(found.recording, found, maker(codecs="paper"))
    (value,) = (value for value in found.recording.values if value.label == "fc1 out")
    offers = profile.codecs[value.index]
    assert offers
    assert all(cost.error == 0 and not cost.lossless for cost in offers)


def test_measuring_draws_no_number_that_stochastic_rounding_would_draw():
    """A run that takes its profiles from the cache rounds as the run did that has measured them."""
    codecs = maker(codecs="paper", rounding="stochastic")
    before = codecs.generator.get_state()
    found = captured(zoo.GPTBlock(dropout=0.0), torch.randn(2, 32, zoo.WIDTH, requires_grad=True))
    profile = measure.measure(found.recording, found, codecs)
    assert any(cost.error for offers in profile.codecs for cost in offers)
    assert torch.equal(codecs.generator.get_state(), before)
