"""Operators that are defined by `torch.library`: replayed, or refused for what they write to or keep."""

import re
import types

import pytest
import torch
import zoo
from changing import recordings
from functions import batch, check
from opaque import array
from recorded import captured, under
from torch import nn

from ds_adacc.program.refusals import COLLECTIVE, OPAQUE

counter = [0]


@pytest.mark.parametrize("kept", ["global", "cell", "attribute"])
def test_a_custom_operator_that_keeps_state_is_refused(kept):
    count, holder = 0, types.SimpleNamespace(count=0)

    @torch.library.custom_op(f"ds_adacc_tests::counts_in_{kept}", mutates_args=())
    def counts(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        if kept == "global":
            counter[0] += 1
        elif kept == "cell":
            count += 1
        else:
            holder.count += 1
        return x * 3

    counts.register_autograd(
        lambda ctx, grad: grad * 3 + 0 * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )

    class Calls(nn.Module):
        def forward(self, x):
            return getattr(torch.ops.ds_adacc_tests, f"counts_in_{kept}")(x.tanh()).tanh()

    counter[0] = 0
    recording = check(Calls(), batch())
    refusals = {op.short_name: op.refusal for op in recording.ops}
    assert refusals["tanh"] is None
    refusal = refusals[f"counts_in_{kept}"]
    assert re.fullmatch(r"it keeps state: .*count.* changes", refusal)
    assert recording.remarks_on_replays == (f"ds_adacc_tests.counts_in_{kept}.default: never replayed: {refusal}",)
    assert max(counter[0], count, holder.count) == 11, "once a call: plain, recorded, and under nine policies"


def test_what_a_custom_operator_reads_must_not_change_before_backward():
    scales = [2.0]

    @torch.library.custom_op("ds_adacc_tests::scaled", mutates_args=())
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * scales[0]

    scaled.register_autograd(lambda ctx, grad: grad * 2)

    class Calls(nn.Module):
        def forward(self, x):
            return torch.ops.ds_adacc_tests.scaled(x.tanh()).tanh()

    block, x = Calls(), batch()
    recording = check(block, x)
    assert all(op.replayable for op in recording.ops)
    run, _ = under(block, recording)
    output = run(x)
    scales[0] = 3.0
    with pytest.raises(RuntimeError, match=r"scaled cannot be replayed: "):
        output.sum().backward()


def scaled_by(name, scales):
    @torch.library.custom_op(f"ds_adacc_tests::{name}", mutates_args=())
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * scales[0]

    scaled.register_autograd(lambda ctx, grad: grad * scales[0])


def test_two_operators_of_one_factory_are_told_apart():
    """The second one's number changes between two steps."""
    first, second = [1.0], [1.0]
    scaled_by("first", first)
    scaled_by("second", second)

    class Calls(nn.Module):
        def forward(self, x):
            x = torch.ops.ds_adacc_tests.first(x.tanh())
            return torch.ops.ds_adacc_tests.second(x).tanh()

    def change():
        second[0] = 3.0

    block = nn.Sequential(Calls(), nn.Linear(zoo.WIDTH, zoo.WIDTH))
    assert recordings(block, change) == 2


def test_an_operator_that_was_not_given_what_it_would_write_to_is_replayed():
    """Flash-attention 3 has such arguments."""

    @torch.library.custom_op("ds_adacc_tests::doubled", mutates_args={"out"})
    def doubled(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is not None:
            out.copy_(x * 2)
        return x * 2

    class Calls(nn.Module):
        def forward(self, x):
            y = x.detach().tanh()
            out = torch.ones_like(y)
            return x * doubled(y) * (doubled(y, out) + out)

    try:
        Calls()(batch())
    except IndexError:
        pytest.skip("torch 2.11 counts such an argument as given")
    given, writing = (op for op in check(Calls(), batch()).ops if op.short_name == "doubled")
    assert given.refusal is None and writing.refusal is None and writing.bases


def test_custom_operators_are_replayed_and_those_that_write_are_refused():
    @torch.library.custom_op("ds_adacc_tests::triple", mutates_args=())
    def triple(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        array(y)[...] = array(x.contiguous()) * 3
        return y

    @torch.library.custom_op("ds_adacc_tests::triple_", mutates_args={"x"})
    def triple_(x: torch.Tensor) -> None:
        array(x)[...] *= 3

    triple.register_autograd(
        lambda ctx, grad: grad * 3 + 0 * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )

    class Calls(nn.Module):
        def forward(self, x):
            y = triple(x.tanh())
            z = y.detach().clone()
            w = z + 1
            triple_(z)
            return y * z + w

    refusals = {op.short_name: op.refusal for op in check(Calls(), batch()).ops}
    assert refusals["triple"] is None and refusals["triple_"] == "writes in place"


SCALE = torch.full((), 2.0)


@torch.library.custom_op("ds_adacc_tests::scaled_by_a_tensor", mutates_args=())
def scaled_by_a_tensor(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE * torch.tensor(3.0)


@torch.library.custom_op("ds_adacc_tests::keeps_the_largest", mutates_args=())
def keeps_the_largest(x: torch.Tensor) -> torch.Tensor:
    SCALE.copy_(torch.maximum(SCALE, x.max()))
    return x / SCALE


@torch.library.custom_op("ds_adacc_tests::of_its_own", mutates_args=())
def of_its_own(x: torch.Tensor) -> torch.Tensor:
    return (x.clone().mul_(2.0) + torch.tensor([1.0])).to(torch.float64).float()


@pytest.mark.parametrize("op", [scaled_by_a_tensor, keeps_the_largest])
def test_a_kernel_that_reads_a_tensor_that_is_not_an_argument_is_never_run_again(op):
    """Somebody may write to it before backward; and to verify it would write to it once more."""
    SCALE.fill_(0.25)
    x = torch.rand(8, 8) + 1.0
    recording = captured(lambda x: op(x.detach()).sin(), x.requires_grad_()).recording
    (recorded,) = [each for each in recording.ops if each.short_name == op._name]
    assert recorded.refusal == "its kernel reads a tensor that is not among its arguments"
    assert torch.equal(SCALE, torch.tensor(0.25) if op is scaled_by_a_tensor else x.detach().max())


def test_a_kernel_that_computes_with_its_arguments_alone_is_replayed():
    recording = captured(lambda x: of_its_own(x.detach()).sin(), torch.randn(8, 8, requires_grad=True)).recording
    (recorded,) = [each for each in recording.ops if each.short_name == of_its_own._name]
    assert recorded.refusal is None


@torch.library.custom_op("ds_adacc_tests::reduced", mutates_args=())
def reduced(x: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.all_reduce(x, "sum", "0").clone()


def test_a_collective_that_a_kernel_calls_as_an_operator_is_seen(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        recording = captured(lambda x: reduced(x.detach()).sin(), torch.randn(8, requires_grad=True)).recording
    finally:
        torch.distributed.destroy_process_group()
    (recorded,) = [each for each in recording.ops if each.short_name == reduced._name]
    assert recorded.refusal == COLLECTIVE


@torch.library.custom_op("ds_adacc_tests::through_sparse", mutates_args=())
def through_sparse(x: torch.Tensor) -> torch.Tensor:
    return x.to_sparse().to_dense() * 2.0


def test_a_kernel_that_makes_tensors_of_another_kind_runs_as_it_does():
    x = torch.randn(4, 4, requires_grad=True)
    found = captured(lambda x: through_sparse(x.detach()) * x, x)
    assert torch.equal(found.output, x * 2.0 * x)
    (recorded,) = [op for op in found.recording.ops if op.short_name == through_sparse._name]
    assert recorded.refusal is not None


def test_an_operator_of_higher_order_runs_as_it_does():
    def forward(x):
        return torch.ops.higher_order.cond(torch.tensor(True), torch.sin, torch.cos, (x.detach(),))[0] * x

    x = torch.randn(4, requires_grad=True)
    recording = captured(forward, x).recording
    assert [op.refusal for op in recording.ops if op.short_name == "cond"] == [OPAQUE]


def test_an_operator_of_no_tensors_runs_as_it_does():
    @torch.library.custom_op("ds_adacc_tests::of_a_number", mutates_args=())
    def of_a_number(size: int) -> torch.Tensor:
        return torch.arange(size) * 2.0

    recording = captured(lambda x: x.sin() * of_a_number(4), torch.randn(4, requires_grad=True)).recording
    (recorded,) = [op for op in recording.ops if op.short_name == of_a_number._name]
    assert recorded.refusal is None
