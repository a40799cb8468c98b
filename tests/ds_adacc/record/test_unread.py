"""A product that is added to a tensor times 0 reads nothing of that tensor, which may be a buffer for all blocks."""

import pytest
import torch
import zoo
from recorded import profile_of, record, under
from torch import nn

from ds_adacc import planner

SHARED = torch.empty(3 * 5 * 5)
BUFFERS = {
    "new memory": lambda x: torch.empty(3, 5, 5, dtype=x.dtype),
    "memory of all blocks": lambda x: SHARED.to(x.dtype).view(3, 5, 5),
    "NaN": lambda x: torch.full((1, 5), float("nan"), dtype=x.dtype),
}


class Scores(nn.Module):
    def __init__(self, buffer, beta=0.0):
        super().__init__()
        self.buffer, self.beta = buffer, beta
        self.query, self.key = nn.Linear(zoo.WIDTH, zoo.WIDTH), nn.Linear(zoo.WIDTH, zoo.WIDTH)

    def forward(self, x):
        key = self.key(x).transpose(1, 2)
        return torch.baddbmm(self.buffer(x), self.query(x), key, beta=self.beta, alpha=0.3).softmax(-1).exp()


def recorded_scores(buffer, beta=0.0, dtype=torch.float32):
    block, x = Scores(buffer, beta).to(dtype), torch.randn(3, 5, zoo.WIDTH, dtype=dtype, requires_grad=True)
    return block, x, record(block, (x,), {})


def is_rebuilt(recording, name):
    policy = planner.recompute_policy(profile_of(recording))
    made = [op.outputs[0] for op in recording.ops if op.short_name == name]
    return made and all(policy.stores[value] is None for value in made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("buffer", BUFFERS.values(), ids=BUFFERS)
def test_what_follows_from_a_product_added_to_nothing_is_recomputed(buffer, dtype):
    block, x, recording = recorded_scores(buffer, dtype=dtype)
    assert is_rebuilt(recording, "exp") and is_rebuilt(recording, "_softmax")
    run, calls = under(block, recording)
    zoo.assert_exact(block, (x,), {}, run)
    assert not calls[0].diverged


def test_writing_to_the_memory_later_is_no_error():
    memory = torch.empty(3, 5, 5)
    block, x, recording = recorded_scores(lambda x: memory)
    expected = torch.autograd.grad(block(x).sum(), [x, *block.parameters()])
    run, _ = under(block, recording)
    output = run(x)
    memory.fill_(float("nan"))
    given = torch.autograd.grad(output.sum(), [x, *block.parameters()])
    assert all(torch.isfinite(gradient).all() for gradient in given)
    zoo.assert_same(given, expected)


def test_what_is_added_is_read_unless_its_factor_is_zero():
    for buffer in (lambda x: torch.empty(3, 5, 5).fill_(2.0), lambda x: torch.ones(3, 5, 5)):
        block, x, recording = recorded_scores(buffer, beta=0.5)
        product = next(op for op in recording.ops if op.short_name == "baddbmm")
        assert len(product.reads) == 3
    added = nn.Parameter(torch.ones(5, 5))
    block, x, recording = recorded_scores(lambda x: added.expand(3, 5, 5))
    product = next(op for op in recording.ops if op.short_name == "baddbmm")
    assert len(product.reads) == 3, "its gradient is 0, and not none"
    run, _ = under(block, recording)
    zoo.assert_exact(block, (x,), {}, run)
