"""Two calls in one context of autocast, of which the second finds the first one's casts: both have one program."""

import pytest
import torch
import zoo
from recomputing import recomputing
from recorded import call_of, profile_of, record, under
from storages import Storages
from torch import nn

from ds_adacc.config import load
from ds_adacc.profile.block_graph import block_graph
from ds_adacc.record.capture import capture
from ds_adacc.runtime.runtime import Runtime

CAST = "_to_copy"


def example(time=5):
    torch.manual_seed(0)
    return zoo.GPTBlock(zoo.WIDTH, 4, 0.0), (torch.randn(2, time, zoo.WIDTH) * 2,)


def autocast(**more):
    return torch.autocast("cpu", torch.bfloat16, **more)


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
    block = nn.Conv1d(3, 4, 3)
    with autocast():
        makes, finds = (record(block, (torch.randn(2, 3, 8, requires_grad=True),), {}) for _ in range(2))
    assert makes.digest == finds.digest and refusals(makes) == refusals(finds) == {None}
    assert {value.origin for value in finds.values} == {"input", "made"}


@pytest.mark.parametrize("cache_enabled", [True, False])
def test_it_is_known_which_casts_autocast_keeps(cache_enabled):
    block, args = example()
    with autocast(cache_enabled=cache_enabled):
        recordings = [record(block, args, {}) for _ in range(2)]
    for recording in recordings:
        assert [op for op in recording.ops if op.cached] == casts_of_parameters(recording) * cache_enabled
        kept = [value.name for value in block_graph(recording).values if value.cached]
        assert len(kept) == 8 * cache_enabled


def test_a_cast_that_the_block_makes_itself_is_not_kept():
    """It looks like one of autocast's, and stands beside one."""
    block, args = Scaling(True, torch.bfloat16), (torch.randn(3, zoo.WIDTH, requires_grad=True),)
    with autocast():
        recording = record(nn.Sequential(block, nn.Linear(zoo.WIDTH, 2, bias=False)), args, {})
    assert [op.cached for op in recording.ops if op.short_name == CAST] == [False, False, True]


class CastingItself(nn.Module):
    """It casts a large weight for each step, as autocast would."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.rand(64, 64) for _ in range(8))

    def forward(self, x):
        for weight in self.weights:
            with torch.no_grad():  # so autograd does not save it
                y = x.bfloat16() @ weight.bfloat16()
            x = x + y
        return x


def test_casts_that_the_block_makes_itself_die_while_it_is_recorded():
    """Nor does autocast keep others, since it was asked for them."""
    block, args = CastingItself(), (torch.randn(2, 64, requires_grad=True),)
    with autocast(), Storages() as storages:
        recording = record(block, args, {})
        left = storages.alive()
    assert not any(op.cached for op in recording.ops)
    one = 64 * 64 * 2
    assert left < one and storages.peak < 4 * one


def test_a_cast_stands_right_before_what_reads_it_first():
    block, args = example()
    with autocast():
        recording = record(block, args, {})
    for op in casts_of_parameters(recording):
        readers = [other for other in recording.ops if op.outputs[0] in other.reads]
        between = recording.ops[op.index + 1 : readers[0].index]
        assert len(readers) == 1 and all(other in casts_of_parameters(recording) for other in between)


@pytest.mark.parametrize("cache_enabled", [True, False])
def test_what_is_saved_before_a_cast_is_of_the_operator_that_saves_it(cache_enabled):
    """Autograd saves what a Linear reads. Then the cast of the bias is noted, and then its matrix product."""
    block, args = example()
    with autocast(cache_enabled=cache_enabled):
        recording = record(block, args, {})
    savers = [recording.ops[position.op] for position in recording.positions]
    assert sum(op.short_name == "addmm" for op in savers) == 8  # the input and the weight of four Linears
    casts = {op.index for op in casts_of_parameters(recording)}
    assert not casts.intersection(position.op for position in recording.positions)


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
    ours, _ = under(block, recording)
    zoo.assert_same(run(block), run(ours))


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
        section = {"memory_budget": 128 << 10, "codecs": "none", "rectifier": {"enabled": False}}
        # Where all costs are equal, the solver takes seconds to prove that no plan is better than the one it has.
        section["solver"] = {"max_seconds": 0.5}
        self.runtime = Runtime(load({"adacc": section}), has_engine=True)
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
        zoo.assert_same(exact, found)


def test_lengths_that_vary_within_a_context_are_predicted():
    towers = TwoTowers()
    for lengths in ((8, 12), (16, 12), (20, 24)):
        towers.compare(lengths)
    recorded = towers.runtime.recordings
    for lengths in ((9, 13), (17, 9), (28, 40), (40, 9), (31, 30)):
        towers.compare(lengths)
    assert towers.runtime.recordings == recorded
    records = [variant for known in towers.runtime.blocks.all() for variant in known.variants()]
    assert all(variant.bound.segments for variant in records)


class Slot:
    """Holds a cast where the recorder finds no tensors."""

    __slots__ = ("cast",)


class Keeping(nn.Module):
    """It casts its weight by itself, keeps the cast, and renews it at every second step."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(zoo.WIDTH, zoo.WIDTH, bias=False), nn.Linear(zoo.WIDTH, zoo.WIDTH)
        self.kept = Slot()

    def renew(self):
        self.kept.cast = self.a.weight.to(torch.bfloat16)

    def forward(self, x):
        return self.b(nn.functional.linear(x.to(torch.bfloat16), self.kept.cast).exp())


def test_a_cast_that_the_program_keeps_is_no_cast_of_autocasts():
    def run(call):
        block, seen = Keeping(), []
        for step in range(4):
            if step % 2 == 0:
                block.renew()
            block.zero_grad()
            x = torch.randn(3, zoo.WIDTH, requires_grad=True)
            with autocast():
                call(block, x).float().square().sum().backward(retain_graph=True)
            seen += [x.grad, *(parameter.grad for parameter in block.parameters())]
            with torch.no_grad():
                for parameter in block.parameters():
                    parameter.mul_(1.5)
        return seen, block

    torch.manual_seed(0)
    exact = run(lambda block, x: block(x))
    runtime = recomputing()
    torch.manual_seed(0)
    found = run(runtime.checkpoint)
    zoo.assert_same(exact[0], found[0])
    (variant,) = (variant for known in runtime.blocks.all() for variant in known.variants())
    (op,) = (op for op in variant.recording.ops if op.refusal)
    assert op.refusal == "the program keeps what it has made" and op.short_name == CAST


class Named(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.name = "a function that is a node's method elsewhere"
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def named(x):
    return Named.apply(x).exp()


def without_gradient(x):
    h = x * 2
    part, _ = h.chunk(2, -1)
    h.mul_(2)
    with torch.no_grad():
        scale = part.mean()
    return h * scale


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(zoo.WIDTH, zoo.WIDTH)
        self.function = function

    def forward(self, x):
        return self.function(self.linear(x))


@pytest.mark.parametrize("function", [named, without_gradient])
def test_nodes_and_views_of_which_torch_does_not_tell(function):
    """A context may have a `name` of its own; a view of what was written to since has no node."""
    args = (torch.randn(3, zoo.WIDTH),)
    with autocast():
        recording = record(Calls(function), args, {})
    assert len(casts_of_parameters(recording)) == 2


def test_the_cast_of_an_input_stands_where_it_runs():
    """Before it is read, the program may write to the input."""

    def cast_first(x):
        cast = x.to(torch.bfloat16)
        return (x * 2).exp() * cast

    args = (torch.randn(3, zoo.WIDTH, requires_grad=True),)
    block = Calls(cast_first)
    block.linear = nn.Identity()
    with autocast():
        recording = record(block, args, {})
    assert [op.short_name for op in recording.ops] == [CAST, "mul", "exp", "mul"]


def test_sparse_tensors_are_no_casts():
    edges = torch.eye(3).to_sparse()
    block, args = Calls(lambda x: torch.sparse.mm(edges, x.float())), (torch.randn(3, zoo.WIDTH),)
    with autocast():
        found = capture("block", call_of(block, *args))
    assert found.recording is None and "a tensor of layout torch.sparse_coo" in found.reason
