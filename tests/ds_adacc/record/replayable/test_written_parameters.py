"""A block that writes to its parameters in forward, as Gemma 3n's clamp does: what reads them is not recomputed."""

import copy

import pytest
import torch
import torch.nn.functional as F
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
    name = {scales_a_part: "mul_", copies: "copy_"}.get(write, "clamp_")
    assert recording.remarks == (f"{name} writes to a parameter in the forward: what reads that is never recomputed",)


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
        zoo.assert_same(*found)
    assert all(variant.bound.segments for _, variant in work.blocks.variants())


class Shares(nn.Module):
    """What it reads shares memory with the parameter to which it writes."""

    def __init__(self):
        super().__init__()
        self.layer, self.whole = nn.Linear(8, 8), nn.Parameter(torch.ones(4, 8))

    def forward(self, x, *given):
        x = (self.layer(x).tanh() + self.read(*given)).exp().sin()
        self.write()
        return (x + self.read(*given)).exp().sin()

    def write(self):
        self.whole.data.mul_(0.9)


class WithParts(Shares):
    """Two parameters lie in one memory."""

    def __init__(self):
        super().__init__()
        self.part = nn.Parameter(self.whole.data[1:3])

    def read(self):
        return self.part.sum(0)


class WritesPart(WithParts):
    def read(self):
        return self.whole.sum(0)

    def write(self):
        self.part.data.mul_(0.9)


class IsGivenPart(Shares):
    """Its caller hands it a view of the parameter, as learned queries are that were expanded."""

    def read(self, queries):
        return queries.sum(0)


class WithFlatBuffer(Shares):
    """The parameter is a part of a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("flat", torch.ones(48))
        self.whole = nn.Parameter(self.flat[:32].view(4, 8))

    def read(self):
        return self.whole.sum(0)

    def write(self):
        self.flat.data.mul_(0.9)


@pytest.mark.parametrize("kind", [WithParts, WritesPart, IsGivenPart, WithFlatBuffer])
@pytest.mark.parametrize("forwards", [1, 2])
def test_what_shares_memory_with_the_parameter_is_seen_to_change_with_it(kind, forwards):
    work, found = recomputing(), []
    for call in (lambda block, *args: block(*args), work.checkpoint):
        torch.manual_seed(0)
        block, xs = kind(), [torch.randn(4, 8, requires_grad=True) for _ in range(forwards)]
        given = [block.whole[:2]] if kind is IsGivenPart else []
        sum(zoo.loss_of(call(block, x, *given)) for x in xs).backward()
        found.append([each.grad for each in (*xs, *block.layer.parameters())])
    zoo.assert_same(*found)
    assert all(variant.bound.segments for _, variant in work.blocks.variants())


class SavesFirst(nn.Module):
    """Autograd saves the parameter before a write that its version counts."""

    def __init__(self):
        super().__init__()
        self.layer, self.routed = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        x = self.routed(self.layer(x).tanh()).exp()
        with_a_count(self.routed.weight)
        return self.routed(x).sin().exp()


def test_a_parameter_that_backward_needs_as_it_was_must_not_be_written_to():
    """As under plain autograd, in the first call too."""
    work, block = recomputing(), SavesFirst()
    for _ in range(2):
        output = work.checkpoint(block, torch.randn(4, 8, requires_grad=True))
        with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
            zoo.loss_of(output).backward()


class SavesData(nn.Module):
    """Autograd takes these data for another tensor, whose version does not count the write."""

    def __init__(self, is_first):
        super().__init__()
        self.is_first, self.layer, self.routed = is_first, nn.Linear(8, 8), nn.Parameter(torch.ones(8, 8))

    def forward(self, x):
        x = self.layer(x).tanh()
        if self.is_first:
            x = F.linear(x, self.routed.data).exp()
        with_a_count(self.routed)
        return (x if self.is_first else F.linear(x, self.routed.data)).sin().exp()


@pytest.mark.parametrize("is_first", [True, False])
def test_data_of_a_parameter_may_be_saved_beside_a_write_to_it(is_first):
    work, found = recomputing(), []
    for call in (lambda block, x: block(x), work.checkpoint):
        torch.manual_seed(0)
        block, xs = SavesData(is_first), [torch.randn(4, 8, requires_grad=True) for _ in range(3)]
        sum(zoo.loss_of(call(block, x)) for x in xs).backward()
        found.append([each.grad for each in (*xs, *block.layer.parameters())])
    zoo.assert_same(*found)
