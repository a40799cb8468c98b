"""What operators cost: what they allocate and free again inside themselves is counted to the byte."""

import gc
import math
from types import SimpleNamespace

import pytest
import torch
import zoo
from recorded import captured
from torch import nn

from ds_adacc.config import load
from ds_adacc.profile import operator_costs as module
from ds_adacc.profile.block_graph import OperatorCost, block_graph
from ds_adacc.profile.codec_maker import CodecMaker
from ds_adacc.profile.measure import measure
from ds_adacc.profile.operator_costs import early_workspace, of_backward_step, operator_costs, replay_workspace
from ds_adacc.profile.timer import Timer
from ds_adacc.program.compiled_backward import has_run

CPU = torch.device("cpu")
MIB = 1 << 20
WIDTH = 64


@torch.library.custom_op("ds_adacc_test::greedy", mutates_args=())
def greedy(x: torch.Tensor) -> torch.Tensor:
    scratch = torch.empty(MIB, dtype=torch.uint8)
    return x.clone() if scratch.numel() else x


@torch.library.custom_op("ds_adacc_test::greedy_backward", mutates_args=())
def greedy_backward(gradient: torch.Tensor) -> torch.Tensor:
    scratch = torch.empty(2 * MIB, dtype=torch.uint8), torch.empty(MIB, dtype=torch.uint8)
    return gradient.clone() if scratch else gradient


greedy.register_autograd(lambda ctx, gradient: greedy_backward(gradient))


@torch.library.custom_op("ds_adacc_test::patient", mutates_args=())
def patient(x: torch.Tensor) -> torch.Tensor:
    return x * x


def patient_backward(ctx, gradient):
    """It lets go of what it has saved before it takes most of its memory."""
    (x,) = ctx.saved_tensors
    early = torch.empty(MIB, dtype=torch.uint8)
    given = 2 * gradient * x
    del x, early
    late = torch.empty(3 * MIB, dtype=torch.uint8)
    return given if late.numel() else None


patient.register_autograd(patient_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


@torch.library.custom_op("ds_adacc_test::one_way", mutates_args=())
def one_way(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


class Block(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.function(x) * self.norm(x)


def by_name(function):
    """The workspaces of a block's operators, in a replay and in backward, by name."""
    found = captured(Block(function), torch.randn(8, WIDTH, requires_grad=True))
    taken = operator_costs(found.recording, found.tensors, Timer(CPU))
    return {op.short_name: (w.replay_bytes, w.backward_bytes) for op, w in zip(found.recording.ops, taken, strict=True)}


def test_an_operators_own_memory_is_counted_in_replay_and_in_backward():
    assert by_name(torch.ops.ds_adacc_test.greedy.default)["greedy"] == (MIB, 3 * MIB)


@pytest.mark.parametrize(("mib", "early"), [(1, 2), (4, 1)])
def test_what_a_step_takes_while_it_has_its_values_is_told_apart(mib, early):
    """Later the step takes 3 MiB. As many of them are told apart as it has saved: 1 MiB, or 4."""
    found = captured(torch.ops.ds_adacc_test.patient.default, torch.randn(mib, MIB // 4, requires_grad=True))
    (op,) = found.recording.ops
    beside = mib * MIB  # of 2 * gradient
    assert of_backward_step(op, found.tensors, found.recording, CPU).backward_bytes == max(3 * MIB, MIB + beside)
    assert early_workspace(op, found.tensors, found.recording, CPU) == max(early * MIB, MIB + beside)


@pytest.mark.parametrize("function", [torch.exp, torch.rsqrt, lambda x: x.softmax(-1)])
def test_nothing_is_left_of_a_step_that_has_saved_its_output(function):
    """A saved output that the hooks keep as it is would keep the node that has saved it, and this the output."""
    found = captured(function, torch.rand(7, 11, 13, requires_grad=True))
    (op,) = found.recording.ops

    def alive():
        gc.collect()
        return sum(isinstance(each, torch.Tensor) and each.shape == (7, 11, 13) for each in gc.get_objects())

    before = alive()
    assert math.isfinite(early_workspace(op, found.tensors, found.recording, CPU))
    assert alive() == before


def test_of_a_parameter_that_is_part_of_a_buffer_only_the_copy_counts():
    """ZeRO keeps all parameters in one buffer."""
    weight = nn.Parameter(torch.zeros(64 * MIB // 4)[: MIB // 4])

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            return x.sin() * self.weight

    found = captured(Scaled(), torch.randn(4, MIB // 4, requires_grad=True))
    cost = operator_costs(found.recording, found.tensors, Timer(CPU))[1]
    whole, summed = 4 * MIB, MIB  # the gradient of the weight, before and after it is summed over the rows
    assert (cost.backward_bytes, cost.early_bytes) == (whole, whole - summed)


def test_where_copies_fail_all_of_the_workspace_is_early(monkeypatch):
    def fail(tensor):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(module, "copy_of", fail)
    found = captured(Block(torch.sin), torch.randn(8, WIDTH, requires_grad=True))
    costs = operator_costs(found.recording, found.tensors, Timer(CPU))
    assert any(cost.backward_bytes for cost in costs)
    assert all(cost.early_bytes == cost.backward_bytes for cost in costs)


def test_what_is_overwritten_in_place_has_a_backward_step_of_its_own():
    """It is replayed together with what overwrites it."""

    def block(x):
        return torch.ops.ds_adacc_test.greedy(x).mul_(2.0).tanh()

    found = captured(block, torch.randn(8, WIDTH, requires_grad=True))
    costs = operator_costs(found.recording, found.tensors, Timer(CPU))
    taken = {op.short_name: cost.backward_bytes for op, cost in zip(found.recording.ops, costs, strict=True)}
    assert taken == {"greedy": 3 * MIB, "mul_": 0, "tanh": 0}


def test_pointwise_operators_have_no_workspace():
    taken = by_name(lambda x: torch.mul(x, x).exp())
    assert taken["mul"] == taken["exp"] == (0, 0)


def test_layer_norm_sums_its_parameters_gradients_by_thread():
    assert by_name(torch.sin)["native_layer_norm"] == (0, 2 * torch.get_num_threads() * WIDTH * 4)


def test_what_is_not_replayed_or_has_no_derivative_takes_nothing():
    found = captured(zoo.GPTBlock(), torch.randn(2, 9, zoo.WIDTH, requires_grad=True))
    refused = [op for op in found.recording.ops if not op.replayable]
    assert refused
    for op in refused:
        assert replay_workspace(op, {}, found.recording.parameters, CPU) == 0
        assert of_backward_step(op, {}, found.recording, CPU) == OperatorCost()
    assert by_name(torch.ops.ds_adacc_test.one_way.default)["one_way"] == (0, 0)


def test_the_backward_of_a_compiled_graph_is_estimated_and_not_run():
    block = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
    x = torch.randn(4, 8, requires_grad=True)
    torch._dynamo.reset()
    found = captured(torch.compile(block, backend="aot_eager"), x)
    (op,) = found.recording.ops
    (cost,) = operator_costs(found.recording, found.tensors, Timer(x.device))
    assert cost.backward_bytes == 4 * 64 * 4, "a gradient of what GELU reads"
    assert cost.backward_seconds == 2 * cost.replay_seconds > 0
    assert not has_run(op.func.cls)


def test_a_backward_is_timed():
    found = captured(zoo.BertBlock(), torch.randn(2, 9, zoo.WIDTH, requires_grad=True))
    op = next(op for op in found.recording.ops if op.short_name == "addmm")
    assert of_backward_step(op, found.tensors, found.recording, CPU).backward_seconds > 0


@pytest.mark.parametrize("name", zoo.NAMES)
def test_measuring_leaves_gradients_random_state_and_hooks_alone(name):
    block, args, kwargs = zoo.example(name)
    expected = zoo.gradients(block, args, kwargs)
    fired = []
    hooks = [p.register_post_accumulate_grad_hook(fired.append) for p in block.parameters() if p.requires_grad]

    def run(*args, **kwargs):
        found = captured(block, *args, **kwargs)
        state = torch.get_rng_state()
        operator_costs(found.recording, found.tensors, Timer(CPU))
        assert torch.equal(state, torch.get_rng_state()) and not fired
        assert all(p.grad is None for p in block.parameters())
        return found.output

    actual = zoo.gradients(block, args, kwargs, run)
    zoo.assert_same_bits(expected, actual)
    assert fired and all(hook.remove() is None for hook in hooks)


def test_the_profile_has_the_workspaces():
    found = captured(Block(torch.ops.ds_adacc_test.greedy.default), torch.randn(8, WIDTH, requires_grad=True))
    graph = measure(found.recording, found, CodecMaker(load({"adacc": {"codecs": "none"}}))).graph
    bare = block_graph(found.recording)
    assert {op.name: op.workspace_bytes for op in graph.ops if op.workspace_bytes} == {"greedy": MIB}
    more = {
        event.name: event.gradient_bytes - plain.gradient_bytes
        for event, plain in zip(graph.events, bare.events, strict=True)
    }
    assert more == {"mul2": 0, "native_layer_norm1": 2 * torch.get_num_threads() * WIDTH * 4, "greedy0": 3 * MIB}


def test_a_backward_on_cuda_is_timed_after_it_has_run_once(monkeypatch):
    """The first run loads kernels and makes handles: its memory counts, its seconds do not."""
    order = []

    class Clock(Timer):
        def once(self, function, before=None):
            order.append("once")
            return super().once(function)

        def __call__(self, function):
            order.append("timed")
            function()
            return 7.0

    class Trace:
        peak, left = 100, 0

        def __init__(self, device):
            pass

        def __enter__(self):
            order.append("trace")
            return self

        def __exit__(self, *exception):
            order.append("end")

    found = captured(zoo.BertBlock(), torch.randn(2, 9, zoo.WIDTH, requires_grad=True))
    op = next(op for op in found.recording.ops if op.short_name == "addmm")
    monkeypatch.setattr(module, "MemoryTrace", Trace)
    monkeypatch.setattr(module, "Timer", lambda device: Clock(CPU))
    device = SimpleNamespace(type="cuda")
    assert of_backward_step(op, found.tensors, found.recording, device).backward_seconds == 7.0
    assert order == ["trace", "once", "end", "timed"]
