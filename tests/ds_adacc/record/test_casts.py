"""Two calls in one context of autocast, of which the second finds the first one's casts: both have one program."""

import pytest
import torch
import zoo
from recorded import profile_of, record, under
from torch import nn

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.runtime.runtime import Runtime

CAST = "_to_copy"


def example(time=5):
    torch.manual_seed(0)
    return zoo.GPTBlock(zoo.WIDTH, 4, 0.0), (torch.randn(2, time, zoo.WIDTH) * 2,)


def autocast(**more):
    return torch.autocast("cpu", torch.bfloat16, **more)


def assert_same(expected, found):
    assert len(expected) == len(found) and all(map(torch.equal, expected, found))


def refusals(recording):
    return {op.refusal for op in recording.ops}


def casts_of_parameters(recording):
    return [op for op in recording.ops if op.short_name == CAST and not op.reads]


def test_a_call_that_finds_casts_has_the_program_of_one_that_makes_them():
    block, args = example()
    with autocast():
        makes, finds = record(block, args, {}), record(block, args, {})
    assert makes.digest == finds.digest and refusals(makes) == refusals(finds) == {None}
    assert len(casts_of_parameters(finds)) == 8  # the weights and biases of four Linears


def test_a_cast_that_is_saved_before_it_is_read():
    """Autograd saves the weight of a convolution before that runs."""
    block, args = nn.Conv1d(3, 4, 3), (torch.randn(2, 3, 8, requires_grad=True),)
    with autocast():
        makes, finds = record(block, args, {}), record(block, args, {})
    assert makes.digest == finds.digest and refusals(makes) == refusals(finds) == {None}
    assert {value.origin for value in finds.values} == {"input", "made"}


def test_a_cast_stands_right_before_what_reads_it_first():
    block, args = example()
    with autocast():
        recording = record(block, args, {})
    for op in casts_of_parameters(recording):
        readers = [other for other in recording.ops if op.outputs[0] in other.reads]
        between = recording.ops[op.index + 1 : readers[0].index]
        assert len(readers) == 1 and all(other in casts_of_parameters(recording) for other in between)


def test_without_the_cache_each_call_casts_for_itself():
    block, args = example()
    with autocast(cache_enabled=False):
        first, second = record(block, args, {}), record(block, args, {})
    assert first.digest == second.digest and refusals(first) == {None}


@pytest.mark.parametrize("first", ["recorded", "plain"])
def test_what_found_casts_is_rebuilt_from_the_parameters(first):
    block, args = example()

    def run(call):
        block.zero_grad()
        with autocast():
            output = block(*args) + call(*args)
        output.float().square().sum().backward()
        return output.detach(), *(parameter.grad for parameter in block.parameters())

    with autocast():
        if first == "plain":
            block(*args)
        recording = record(block, args, {})
    ours, _ = under(block, recording, planner.recompute_policy(profile_of(recording)))
    assert_same(run(block), run(ours))


def test_a_cast_from_before_its_parameter_was_changed_is_never_made_again():
    block, args = example()
    with autocast():
        block(*args)
        with torch.no_grad():
            block.fc1.weight.mul_(2.0)
        recording = record(block, args, {})
    (captured,) = (value for value in recording.values if value.origin == "captured")
    assert captured.geometry.size == block.fc1.weight.shape
    assert len(casts_of_parameters(recording)) == 7


class Scaling(nn.Module):
    """It casts as autocast does, what autocast does not keep."""

    def __init__(self, requires_grad, dtype):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(zoo.WIDTH), requires_grad)
        self.dtype = dtype

    def forward(self, x):
        return (x * self.scale.to(self.dtype)).exp()


@pytest.mark.parametrize(("requires_grad", "dtype"), [(False, torch.bfloat16), (True, torch.float16)])
def test_other_casts_are_operators_where_they_run(requires_grad, dtype):
    block, args = Scaling(requires_grad, dtype), (torch.randn(3, zoo.WIDTH, requires_grad=True),)
    with autocast():
        recording = record(block, args, {})
    assert [op.short_name for op in recording.ops] == [CAST, "mul", "exp"]
    assert refusals(recording) == {None}


class TwoTowers:
    """Blocks that read two batches of different lengths within one context, as the encoder of a search engine does."""

    def __init__(self):
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(zoo.GPTBlock(zoo.WIDTH, 4, 0.0) for _ in range(2))
        section = {"memory_budget": 0.3, "codecs": "none", "rectifier": {"enabled": False}}
        self.runtime = Runtime(load({"adacc": section}), stepped=True)
        self.runtime.profiler.profile = lambda recording, captured: profile_of(recording)

    def step(self, lengths, call):
        torch.manual_seed(sum(lengths))
        self.blocks.zero_grad()
        inputs = [torch.randn(2, length, zoo.WIDTH, requires_grad=True) for length in lengths]
        loss = torch.zeros(())
        with autocast():
            for x in inputs:
                for block in self.blocks:
                    x = call(block, x)
                loss = loss + x.float().square().sum()
        loss.backward()
        return tuple(tensor.grad.clone() for tensor in (*inputs, *self.blocks.parameters()))

    def compare(self, lengths):
        exact = self.step(lengths, lambda block, x: block(x))
        found = self.step(lengths, self.runtime.checkpoint)
        self.runtime.controller.end_backward()
        self.runtime.controller.end_step()
        assert_same(exact, found)


def test_lengths_that_vary_within_a_context_are_predicted():
    towers = TwoTowers()
    for lengths in ((8, 12), (16, 12), (20, 24)):
        towers.compare(lengths)
    recorded = towers.runtime.recordings
    for lengths in ((9, 13), (17, 9), (28, 40), (40, 9), (31, 30)):
        towers.compare(lengths)
    assert towers.runtime.recordings == recorded
    records = [record for known in towers.runtime.blocks.all() for record in known.records()]
    assert all(record.bound.replays for record in records)
