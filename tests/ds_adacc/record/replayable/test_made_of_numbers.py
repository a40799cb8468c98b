"""Tensors that are made of Python's numbers alone hold no data: what follows a read of them is recomputed."""

import functools

import numpy as np
import pytest
import torch
import zoo
from experts import EXPERTS, LAYERS, WIDTH, configured, layers, plainly, recordings, same, train
from recomputing import compare, recomputing
from recorded import record
from torch import nn

from ds_adacc import checkpointing
from ds_adacc.checkpointing import checkpoint
from ds_adacc.program.refusals import TAINTED


class Capacity(nn.Module):
    """A gate as in GShard: each expert takes as many tokens as its capacity, which tensors of numbers compute."""

    def __init__(self, factor=1.25):
        super().__init__()
        self.factor, self.gate, self.expert = factor, nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        capacity = torch.ceil((len(x) / EXPERTS) * torch.tensor(self.factor)).to(torch.int64)
        capacity = torch.maximum(capacity, torch.tensor(4).to(torch.int64))
        chosen = torch.topk(scores, k=min(capacity, torch.tensor(len(x))), dim=0)[1]
        taken = torch.zeros_like(scores).scatter(0, chosen, 1.0)
        return x + self.expert((x * (scores * taken).sum(-1, keepdim=True)).tanh()).exp()[: int(capacity) * EXPERTS]


def batch(_, step, rows=(16, 12, 20, 8, 16, 14)):
    return (torch.randn(rows[step], WIDTH, requires_grad=True),)


def test_a_capacity_is_no_data_and_all_that_follows_is_recomputed():
    runtime = compare(Capacity, 6, batch)
    for _, variant in runtime.blocks.variants():
        ops = variant.recording.ops
        assert variant.recording.data_read_at is None and variant.recording.numbers_read_after is not None
        assert all(op.replayable for op in ops)
        assert not {"ceil", "maximum", "lt"}.intersection(op.short_name for op in ops)  # which are of numbers alone


def test_where_the_program_asks_for_checkpointing_such_a_block_is_recomputed_as_a_whole_and_recorded_at_few_lengths():
    sizes = (48, 40, 56, 44, 61, 36, 53)
    plain = train(layers(Capacity), plainly, sizes)
    runtime, blocks = configured(memory_budget=0.6), layers(Capacity)
    try:
        assert same(train(blocks, checkpoint, sizes), plain)
    finally:
        checkpointing.registry.reset()
    assert runtime.recordings == LAYERS + 2
    assert all(each.is_whole for each in recordings(runtime))


def test_a_block_that_reads_a_number_at_its_end_is_recomputed_operator_by_operator_even_then():
    class Ending(Capacity):
        def forward(self, x):
            return x + self.expert((x * self.gate(x).sum(-1, keepdim=True)).tanh())[: torch.tensor(len(x))]

    runtime, blocks = configured(memory_budget=0.9), layers(Ending)
    try:
        train(blocks, checkpoint)
    finally:
        checkpointing.registry.reset()
    for recording in recordings(runtime):
        assert recording.numbers_read_after is not None and not recording.is_whole


def test_a_number_that_changes_between_two_calls_is_noticed():
    def another(block, step):
        block.factor = (1.0, 1.5, 1.0, 2.0)[step]
        return (torch.randn(16, WIDTH, requires_grad=True),)

    compare(Capacity, 4, another)


class Reading(nn.Module):
    """Reads what `number` makes of the input, and goes on."""

    def __init__(self, number):
        super().__init__()
        self.number, self.layer = number, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(x).tanh() * self.number(x).item()


OF_NUMBERS = {
    "a number": lambda x: torch.tensor(1.5),
    "a whole number": lambda x: torch.tensor(3),
    "a size": lambda x: torch.tensor(len(x)),
    "in bfloat16": lambda x: torch.tensor(0.1, dtype=torch.bfloat16),
    "not a number": lambda x: torch.tensor(float("nan")),
    "a truth": lambda x: torch.tensor(True),
    "of NumPy": lambda x: torch.tensor(np.float32(1.5)),
    "as_tensor": lambda x: torch.as_tensor(1.5),
    "new_tensor": lambda x: x.new_tensor(1.5),
    "a sum": lambda x: torch.arange(len(x)).sum() + torch.ones(3).sum(),
    "a minimum": lambda x: min(torch.tensor(1.5), torch.tensor(2.0)),
    "a quotient of two numbers": lambda x: torch.div(len(x), 3, rounding_mode="trunc"),
    "a logarithmic space": lambda x: torch.logspace(0, 1, 4).sum(),
}


class Reads:
    """An object that is a number for torch."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __float__(self):
        return float(self.tensor[0, 0])


OF_DATA = {
    "a mean": lambda x: x.detach().mean(),
    "a tensor of it": lambda x: torch.tensor(x.detach().mean()),
    "in a list": lambda x: torch.tensor([x.detach().mean()])[0],
    "an array's memory": lambda x: torch.from_numpy(np.array(1.5)),
    "beside a number": lambda x: torch.tensor(1.5) + x.detach()[0, 0],
    "drawn": lambda x: torch.rand(()) + torch.tensor(1.5),
    "written to": lambda x: torch.tensor(1.5).add_(x.detach()[0, 0]),
    "never written to": lambda x: torch.empty(()).fill_(1.0) + torch.empty(()),
    "of an object": lambda x: torch.tensor(Reads(x.detach()), dtype=torch.float32),
    "of an object, new": lambda x: x.new_tensor(Reads(x.detach())),
    "of an object, as": lambda x: torch.as_tensor(Reads(x.detach()), dtype=torch.float32),
    "a file": lambda x: torch.from_file(__file__, size=1, dtype=torch.uint8).sum(),
    "of another dimension": lambda x: torch.tensor([1.5])[0],  # a list may hold data, of which nothing tells
}


@pytest.mark.parametrize("number", OF_NUMBERS.values(), ids=OF_NUMBERS)
def test_reading_what_was_made_of_numbers_tells_nothing_of_data(number):
    block, x = Reading(number), (torch.randn(4, WIDTH, requires_grad=True),)
    recording = record(block, x, {})
    assert recording.data_read_at is None and all(op.replayable for op in recording.ops if op.short_name == "tanh")
    assert recording.numbers_read_after is not None and recording.ops[-1].replayable


@pytest.mark.parametrize("number", OF_DATA.values(), ids=OF_DATA)
def test_reading_anything_else_does(number):
    recording = record(Reading(number), (torch.randn(4, WIDTH, requires_grad=True),), {})
    assert recording.data_read_at is not None and recording.ops[-1].refusal == TAINTED


def test_a_number_that_comes_after_a_read_of_data_may_hold_it():
    def block(x):
        mean = x.detach().mean().item()
        return x.sin() * torch.tensor(mean).item()

    recording = record(block, (torch.randn(4, WIDTH, requires_grad=True),), {})
    assert recording.ops[-1].refusal == TAINTED and recording.numbers_read_after is None


def test_a_tensor_of_a_number_that_the_block_keeps_is_read_where_it_is():
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale = nn.Linear(WIDTH, WIDTH), None

        def forward(self, x):
            if self.scale is None:
                self.scale = torch.tensor(1.5)
            return self.layer(x).tanh() * self.scale

    def another(block, step):
        if step == 2:
            block.scale = torch.tensor(-3.0)
        if step == 4:
            block.scale.mul_(2)
        return (torch.randn(4, WIDTH, requires_grad=True),)

    compare(Keeping, 6, another)


def test_a_number_that_a_function_keeps_for_later_calls_may_be_another_then():
    @functools.lru_cache
    def kept():
        return torch.tensor(2.0)

    def counting(x):
        counter = kept()
        factor = counter.item()
        counter += 1
        return x.sin() * factor

    def scheduled(x):
        return x.sin() * (kept() + 1.0).item()

    def another(block, step):
        if block.function is scheduled and step == 2:
            kept().fill_(7.0)
        return (torch.randn(4, WIDTH, requires_grad=True),)

    for function in (counting, scheduled):
        runtime, expected = recomputing(), []
        for call in (lambda block, x: block(x), runtime.checkpoint):
            kept.cache_clear()
            torch.manual_seed(0)
            block, seen = Lambda(function), []
            for step in range(4):
                torch.manual_seed(step)
                args = another(block, step)
                seen.append(zoo.gradients(block, args, {}, lambda x, b=block, c=call: c(b, x)))
                runtime.controller.end_backward()
            expected.append(seen)
        for one, other in zip(*expected, strict=True):
            zoo.assert_same_bits(one, other)


class Lambda(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.layer = function, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.function(self.layer(x)).exp().tanh()


def test_a_number_may_be_written_in_place_by_numbers():
    def block(x):
        capacity = torch.ceil(torch.tensor(1.25) * (len(x) / 4))
        capacity.clamp_(min=2)
        return x.sin().exp()[: int(capacity) * 4].tanh()

    recording = record(block, (torch.randn(8, WIDTH, requires_grad=True),), {})
    assert recording.data_read_at is None and all(op.replayable for op in recording.ops)
    assert not any(value.overwritten for value in recording.values)


class Measured(nn.Module):
    """Reads data where only the watch of Python's calls tells of it, and then computes with numbers, or does not."""

    def __init__(self, read, computes):
        super().__init__()
        self.read, self.computes = read, computes
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.down(self.up(x).sin().exp().tanh())
        number = self.read(y.detach())
        return y * (number.sin() * 2) * (torch.tensor(1.5) * 2) if self.computes else y * number


@pytest.mark.parametrize(
    "read",
    [lambda x: torch.tensor(float(x.numpy().mean())), lambda x: torch.tensor(Reads(x), dtype=x.dtype)],
    ids=["NumPy", "an object"],
)
def test_a_program_with_numbers_is_predicted_though_nothing_watches_a_call_that_is_followed(read):
    sizes, counts = (48, 40, 56, 44, 60, 36, 52), []
    for computes in (False, True):
        make = functools.partial(Measured, read, computes)
        plain, runtime = train(layers(make), plainly, sizes), configured(memory_budget=0.9)
        try:
            found = train(
                layers(make), lambda block, x, r=runtime: r.run(r.blocks.of(block), block, block, (x,), {}), sizes
            )
        finally:
            checkpointing.registry.reset()
        assert same(found, plain)
        counts.append(runtime.recordings)
    assert counts[0] == counts[1]


def test_a_large_tensor_of_numbers_is_held_as_any_other():
    def block(x):
        return x.sin() * torch.tensor(1.5).repeat(len(x), WIDTH)

    recording = record(block, (torch.randn(4, WIDTH, requires_grad=True),), {})
    (repeated,) = (value for value in recording.values if value.name.startswith("repeat"))
    assert repeated.origin == "made" and repeated.index in recording.saved


def test_what_only_computes_with_a_number_is_recorded_no_more_often_than_without_it():
    """As a constant of the program, a number that follows a length would make another program of each length."""

    class Mean(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor, self.layer = factor, nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.layer(x).tanh() * self.factor(x)

    by_tensor = compare(lambda: Mean(lambda x: torch.tensor(1 / len(x))), 6, batch)
    without = compare(lambda: Mean(lambda x: 1.0), 6, batch)
    assert by_tensor.recordings == without.recordings
