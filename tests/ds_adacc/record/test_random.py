"""Random operators: recording moves no generator, and a draw is replayed only from a state that a plan can note."""

import random

import deepspeed
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
from recorded import profile_of, random_policy, record, under
from torch import nn

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.python_state.closure import closure_of
from ds_adacc.runtime.runtime import Runtime


@torch.library.custom_op("ds_adacc_tests::untagged_noise", mutates_args=())
def untagged_noise(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand(x.shape)


@torch.library.custom_op("ds_adacc_tests::numpy_noise", mutates_args=())
def numpy_noise(x: torch.Tensor) -> torch.Tensor:
    return x * float(np.random.rand())


@torch.library.custom_op("ds_adacc_tests::python_noise", mutates_args=())
def python_noise(x: torch.Tensor) -> torch.Tensor:
    return x * random.random()


for noise in (untagged_noise, numpy_noise, python_noise):
    noise.register_autograd(lambda ctx, gradient: gradient)


class Block(nn.Module):
    """Linear layers around a function, which may use the block's own generator."""

    def __init__(self, function):
        super().__init__()
        self.one, self.two, self.function = nn.Linear(8, 8), nn.Linear(8, 8), function
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x):
        return self.two(self.function(self.one(x), self.generator).tanh())


DRAWS = {
    "default": lambda h, _: F.dropout(h, 0.4),
    "own generator": lambda h, own: h * torch.rand(h.shape, generator=own),
    "untagged": lambda h, _: untagged_noise(h),
    "NumPy's": lambda h, _: numpy_noise(h) * np.random.rand(),
    "Python's": lambda h, _: python_noise(h) * random.random(),
}


def seed_all(block):
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    block.generator.manual_seed(5)


def states(block):
    keys = np.random.get_state()[1].tobytes(), np.random.get_state()[2]
    return torch.get_rng_state().tolist(), block.generator.get_state().tolist(), keys, random.getstate()


def trained(block, call, steps=1):
    """Gradients of each step, and the states of all generators after it."""
    seed_all(block)
    results = []
    for _ in range(steps):
        x = torch.linspace(-1, 1, 4096).view(512, 8).requires_grad_()
        gradients = torch.autograd.grad(call(block, x).square().sum(), [x, *block.parameters()])
        results.append(([gradient.tolist() for gradient in gradients], states(block)))
    return results


@pytest.mark.parametrize("name", DRAWS)
def test_recording_leaves_every_generator_as_plain_autograd_does(name):
    block = Block(DRAWS[name])
    runtime = Runtime(load({"adacc": {"codecs": "none", "memory_budget": 1.0}}))
    plain = trained(block, lambda block, x: block(x), steps=4)
    assert trained(block, runtime.checkpoint, steps=4) == plain
    assert runtime.recordings == 1


@pytest.mark.parametrize("name", ["default", "own generator", "untagged"])
def test_what_draws_from_a_known_state_is_replayed(name):
    block = Block(DRAWS[name])
    recording = record(block, (torch.randn(512, 8, requires_grad=True),), {})
    assert recording.draws
    drawn = next(op for op in reversed(recording.ops) if op.draws)
    assert drawn.refusal is None
    policy = planner.recompute_policy(profile_of(recording))
    assert drawn.index in recording.segments.replayed(policy.stores)
    plain = trained(block, lambda block, x: block(x), steps=3)
    run, calls = under(block, recording, policy)
    assert trained(block, lambda _, x: run(x), steps=3) == plain
    assert not any(call.diverged for call in calls)


def test_a_generator_that_the_block_makes_anew_is_not_replayed():
    """Its state is not known when the call begins; and the next call has another one."""
    block = Block(lambda h, _: h * torch.rand(h.shape, generator=torch.Generator().manual_seed(1)))
    recording = record(block, (torch.randn(8, 8, requires_grad=True),), {})
    reason = "it draws from a generator that neither the block's modules nor its closure have"
    assert [op.refusal for op in recording.ops if op.short_name == "rand"] == [reason]


def test_a_generator_in_a_closure_is_known():
    own = torch.Generator()
    assert list(closure_of(lambda x: x * torch.rand(3, generator=own)).generators()) == [own]


def test_blocks_with_generators_of_their_own_are_of_one_type():
    digests = {record(Block(DRAWS["own generator"]), (torch.randn(8, 8, requires_grad=True),), {}).digest for _ in "ab"}
    assert len(digests) == 1


def test_looking_at_generators_adds_nothing_to_the_program():
    recording = record(zoo.GPTBlock(), (torch.randn(2, 9, zoo.WIDTH, requires_grad=True),), {})
    assert recording.draws
    assert not [value.name for value in recording.values if value.origin == "captured"]


def test_two_draws_without_a_saved_tensor_between_are_not_replayed():
    """The second does not begin where a plan can note a state, and the first does not end there."""
    block = Block(lambda h, _: h * (torch.rand(8) + torch.rand(8)))
    recording = record(block, (torch.randn(8, 8, requires_grad=True),), {})
    assert [op.refusal for op in recording.ops if op.short_name == "rand"] == [
        "its generator was moved or set between this draw and the next saved tensor",
        "its generator was moved or set between the last saved tensor and this draw",
    ]


def test_draws_from_a_forked_state_are_not_replayed_unless_the_fork_saves_a_tensor_before():
    tracker = deepspeed.checkpointing.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("model-parallel-rng", 123)

    def function(h, _):
        with tracker.fork():
            h = F.dropout(h, 0.4)
            h = F.dropout(h.sin(), 0.4)
        return F.dropout(h, 0.1)

    block = Block(function)
    plain = zoo.gradients(block, (x := torch.randn(8, 8, requires_grad=True),), {})
    tracker.reset()
    tracker.add("model-parallel-rng", 123)
    try:
        recording = record(block, (x,), {})
        assert [op.replayable for op in recording.ops if op.short_name == "div_"] == [False, True, False]
        for seed in range(5):
            run, _ = under(block, recording, random_policy(recording, seed))
            tracker.reset()
            tracker.add("model-parallel-rng", 123)
            zoo.assert_same_bits(plain, zoo.gradients(block, (x,), {}, run))
    finally:
        tracker.reset()


@pytest.mark.parametrize(
    "draw",
    [
        lambda h: h * torch.randn(h.shape),  # draws by rejection keep a number for the next time
        lambda h: h * torch.randn(3, 5).sum() * torch.rand(()).add_(0.5),
        lambda h: h[torch.randperm(8)].sin(),
        lambda h: h * torch.multinomial(torch.ones(8, 8), 8),
        lambda h: F.gumbel_softmax(h, dim=-1),
        lambda h: F.alpha_dropout(h, 0.3),
        lambda h: F.dropout1d(h[None], 0.5)[0],
        lambda h: h * h.new_empty(8, 1).bernoulli_(0.7).div_(0.7),
        lambda h: torch.normal(h.detach(), 1.0) * h,
        lambda h: torch.poisson(h.detach().abs()) * h,
    ],
)
def test_every_kind_of_draw_is_rebuilt_or_held_to_the_bit(draw):
    block = Block(lambda h, _: draw(h))
    x = torch.randn(8, 8, requires_grad=True)
    plain = zoo.gradients(block, (x,), {})
    recording = record(block, (x,), {})
    policies = [planner.recompute_policy(profile_of(recording)), *(random_policy(recording, n) for n in range(5))]
    for policy in policies:
        run, calls = under(block, recording, policy)
        zoo.assert_same_bits(plain, zoo.gradients(block, (x,), {}, run))
        assert not calls[0].diverged


def test_dropout_behind_a_router_makes_no_type_for_each_routing():
    torch.manual_seed(0)
    block = zoo.RouterBlock()
    for expert in block.experts:
        expert.insert(2, nn.Dropout(0.2))
    batches = torch.randn(3, 8, 16, zoo.WIDTH)
    assert len({record(block, (x.requires_grad_(),), {}).digest for x in batches.unbind()}) == 1
