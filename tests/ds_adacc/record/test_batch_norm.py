"""Batch norm: its operator updates running statistics, which its schema does not mention."""

import copy

import pytest
import torch
import zoo
from recorded import profile_of, record, under
from torch import nn

from ds_adacc import planner


class Block(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.convolution, self.norm, self.last = nn.Conv1d(6, 6, 3), nn.BatchNorm1d(6, **options), nn.Conv1d(6, 6, 1)

    def forward(self, x):
        return self.last(nn.functional.gelu(self.norm(self.convolution(x))))


def batch(dtype=torch.float32):
    return torch.randn(3, 6, 11, dtype=dtype, requires_grad=True)


def norm_of(recording):
    return next(op for op in recording.ops if op.short_name == "native_batch_norm")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}], ids=str)
def test_in_training_it_is_replayed_and_its_statistics_move_once(options, dtype):
    block, x = Block(**options).to(dtype), batch(dtype)
    recording = record(block, (x,), {})
    norm, policy = norm_of(recording), planner.recompute_policy(profile_of(recording))
    assert norm.refusal is None
    assert norm.outputs[0] in recording.saved or norm.index in recording.segments.replayed(policy.stores)
    plain, run = copy.deepcopy(block), under(block, recording, policy)[0]
    for _ in range(2):
        zoo.assert_same_bits(zoo.gradients(plain, (x,), {}), zoo.gradients(block, (x,), {}, run))
        zoo.assert_same([*plain.state_dict().values()], [*block.state_dict().values()])


def test_its_replay_does_not_read_what_the_statistics_are_in_backward():
    block, x = Block(), batch()
    run, _ = under(block, record(block, (x,), {}))
    (expected,) = torch.autograd.grad(block(x).square().sum(), x)
    loss = run(x).square().sum()
    block.norm.running_mean.data.fill_(torch.nan)
    block.norm.running_var.data.fill_(torch.nan)
    assert torch.equal(expected, *torch.autograd.grad(loss, x))
    assert block.norm.running_mean.isnan().all(), "no replay wrote to them"


def test_in_evaluation_it_reads_them_and_is_not_replayed():
    """A forward in training, between forward and backward, would change them, and no version would tell."""
    recording = record(Block().eval(), (batch(),), {})
    assert "running statistics" in norm_of(recording).refusal
    assert norm_of(record(Block(track_running_stats=False).eval(), (batch(),), {})).refusal is None


def test_what_else_reads_statistics_that_it_updates_is_not_replayed():
    """The next forward updates them before this one's backward, and no version tells."""

    class Reading(Block):
        def forward(self, x):
            y = self.norm(self.convolution(x))
            return self.last((y - self.norm.running_mean[:, None]).exp())

    block, x = Reading(), batch()
    recording = record(block, (x,), {})
    assert {op.short_name: op.refusal is None for op in recording.ops if op.short_name in ("sub", "exp")} == {
        "sub": False,
        "exp": True,
    }
    run, _ = under(block, recording)
    gradients = []
    for call in (copy.deepcopy(block), run):
        losses = [call(x * factor).square().sum() for factor in (1, 3)]
        gradients.append([torch.autograd.grad(loss, x)[0] for loss in losses])
    zoo.assert_same(*gradients)
