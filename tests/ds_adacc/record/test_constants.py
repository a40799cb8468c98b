"""A number that blocks compute with makes no block type of its own; a size, an index or a dimension does."""

import pytest
import torch
import zoo
from recorded import record, under
from torch import nn

from ds_adacc.config import load
from ds_adacc.runtime.runtime import Runtime

LOSSLESS = {"memory_budget": 0.8, "codecs": "none", "solver": {"max_seconds": 30.0}}
COMPUTED = {
    "added": lambda x, n: x + n,
    "a factor": lambda x, n: x * n,
    "divided by it": lambda x, n: n / x.exp(),
    "alpha": lambda x, n: torch.add(x, x.tanh(), alpha=n),  # torch leaves out an alpha of 1
    "a bound": lambda x, n: x.clamp(min=-n, max=n),
    "an exponent": lambda x, n: x.abs() ** n,
    "compared": lambda x, n: torch.where(x > n, x, n),
    "filled in": lambda x, n: x.masked_fill(x > 0, n),
    "a tensor of it": lambda x, n: x * torch.full_like(x, n),
    "a rate": lambda x, n: x * (n / 7),
}
SHAPING = {
    "an index": lambda x, n: x[..., n] * x.sum(-1),
    "a length": lambda x, n: x[..., : n + 1].sum(-1),
    "a shape": lambda x, n: x.repeat(n, 1, 1).sum(0),
    "a dimension": lambda x, n: x.sum(n - 1),
    "a shift": lambda x, n: x.roll(n, -1),
    "a length by a tensor": lambda x, n: x[..., : torch.tensor(n) + 1].sum(-1),
    "counted to": lambda x, n: x[..., :1] * torch.arange(n).sum(),
}


class Numbered(nn.Module):
    def __init__(self, number, use):
        super().__init__()
        self.number, self.use = number, use
        self.linear = nn.Linear(zoo.WIDTH, zoo.WIDTH)

    def forward(self, x):
        return self.use(self.linear(x).sin(), self.number).exp().tanh()


def digests(use):
    x = torch.randn(2, 5, zoo.WIDTH, requires_grad=True)
    return {record(Numbered(number, use), (x,), {}).digest for number in (1, 2, 3)}


@pytest.mark.parametrize("use", COMPUTED.values(), ids=COMPUTED)
def test_blocks_that_compute_with_other_numbers_are_of_one_type(use):
    assert len(digests(use)) == 1


@pytest.mark.parametrize("use", SHAPING.values(), ids=SHAPING)
def test_blocks_of_other_sizes_and_indices_are_not(use):
    assert len(digests(use)) == 3


@pytest.mark.parametrize("use", COMPUTED.values(), ids=COMPUTED)
def test_each_block_is_replayed_with_its_own_number(use):
    x = torch.randn(2, 5, zoo.WIDTH, requires_grad=True)
    for number in (1, 2, 3):
        block = Numbered(number, use)
        expected = zoo.gradients(block, (x,), {})
        run, calls = under(block, record(block, (x,), {}))
        zoo.assert_same_bits(expected, zoo.gradients(block, (x,), {}, run))
        assert not any(call.diverged for call in calls)


def test_a_stack_of_numbered_layers_has_one_profile_and_one_frontier():
    torch.manual_seed(0)
    blocks = nn.ModuleList(Numbered(number, COMPUTED["a factor"]) for number in range(1, 7))
    work = Runtime(load({"adacc": LOSSLESS}), has_engine=True)
    x = torch.randn(2, 5, zoo.WIDTH, requires_grad=True)

    def run(call, x):
        for block in blocks:
            x = call(block, x)
        return x

    expected = zoo.gradients(blocks, (x,), {}, lambda x: run(lambda block, x: block(x), x))
    for _ in range(4):
        zoo.assert_same_bits(expected, zoo.gradients(blocks, (x,), {}, lambda x: run(work.checkpoint, x)))
        work.controller.end_step()
    (block_type,) = work.controller.plan.block_types
    assert block_type.count == 6 and work.profiler.measured == 1
    recordings = [variant.bound.recording for _, variant in work.blocks.variants()]
    assert len({recording.constants for recording in recordings}) == 6
