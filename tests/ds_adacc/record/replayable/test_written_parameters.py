"""A block that writes to its parameters in forward, as Gemma 3n's clamp does: what reads them is not recomputed."""

import copy

import pytest
import torch
import zoo
from recomputing import recomputing
from recorded import record
from torch import nn

from ds_adacc.program.refusals import WRITTEN
from ds_adacc.whole_blocks.one_operator import why_not_again


class Clamped(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.write = write
        self.first, self.routed, self.last = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x).tanh()
        if self.write is not with_a_count:  # else autograd raises an error, as it counts that write
            x = x + self.routed(x).exp()
        self.write(self.routed.weight)
        return x + self.last(self.routed(x.sin()).tanh()).exp()


def clamps(weight):
    weight.data.clamp_(-0.1, 0.1)


def with_a_count(weight):
    with torch.no_grad():
        weight.clamp_(-0.1, 0.1)


def scales_a_part(weight):
    weight.data[:, 2:6].mul_(0.9)


def copies(weight):
    weight.data.copy_(weight.detach() / weight.detach().norm(dim=0))


WRITES = clamps, with_a_count, scales_a_part, copies


@pytest.mark.parametrize("write", WRITES)
def test_what_reads_the_parameter_is_not_recomputed_and_all_else_is(write):
    torch.manual_seed(0)
    recording = record(Clamped(write), (torch.randn(4, 8, requires_grad=True),), {})
    ops = recording.ops
    assert {op.refusal for op in ops if op.short_name == "mm"} == {WRITTEN}
    assert all(op.replayable for op in ops if op.short_name in ("addmm", "sin", "exp", "tanh"))
    assert why_not_again(recording) == "it writes to a parameter"


@pytest.mark.parametrize(("write", "forwards"), [*((write, 1) for write in WRITES), (clamps, 2), (scales_a_part, 2)])
def test_gradients_and_weights_are_those_of_plain_autograd(write, forwards):
    torch.manual_seed(0)
    plain, work = Clamped(write), recomputing()
    block = copy.deepcopy(plain)
    for step in range(4):
        found = []
        for module, call in ((plain, lambda b, x: b(x)), (block, work.checkpoint)):
            torch.manual_seed(step)
            xs = [torch.randn(4, 8, requires_grad=True) for _ in range(forwards)]
            module.zero_grad()
            loss = sum(zoo.loss_of(call(module, x)) for x in xs)  # all forwards before the backward
            loss.backward()
            gradients = [each.grad for each in (*xs, *module.parameters())]
            found.append([loss, *gradients, *copy.deepcopy(module).parameters()])
        work.controller.end_backward()
        assert all(map(torch.equal, *found))
    assert all(variant.bound.segments for _, variant in work.blocks.variants())
