"""Retain and recompute change no bit of outputs and gradients."""

import sys

import pytest
import torch
import zoo
from recorded import profile_of, random_policy, record, under
from torch import nn

import ds_adacc.program.replay
import ds_adacc.record.replayable.verify
from ds_adacc import planner
from ds_adacc.profile.block_graph import block_graph


@pytest.fixture(params=zoo.NAMES)
def case(request):
    block, args, kwargs = zoo.example(request.param)
    expected = zoo.gradients(block, args, kwargs)
    return block, args, kwargs, expected, record(block, args, kwargs)


@pytest.fixture
def few_calls():
    """Python allows fewer calls within each other than usual, so that a chain of more values is short."""
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    yield
    sys.setrecursionlimit(usual)


def test_recompute_everything(case):
    block, args, kwargs, expected, recording = case
    run, calls = under(block, recording)
    zoo.assert_same_bits(expected, zoo.gradients(block, args, kwargs, run))
    assert not any(call.diverged for call in calls)


def test_retain_everything(case):
    block, args, kwargs, expected, recording = case
    run, _ = under(block, recording, planner.retain_policy(profile_of(recording)))
    zoo.assert_same_bits(expected, zoo.gradients(block, args, kwargs, run))


def test_random_policies(case):
    block, args, kwargs, expected, recording = case
    for seed in range(20):
        run, _ = under(block, recording, random_policy(recording, seed))
        zoo.assert_same_bits(expected, zoo.gradients(block, args, kwargs, run))


@pytest.mark.parametrize(
    ("name", "share"),
    [("gpt", 0.85), ("llama", 0.95), ("eager", 0.75), ("bert", 0.95), ("opaque", 0.2), ("many", 0.7)],
)
def test_most_of_what_is_saved_can_be_rebuilt(name, share):
    recording = record(*zoo.example(name))
    rebuildable = block_graph(recording).rebuildable_ops
    owned = [recording.values[i] for i in recording.saved if recording.values[i].owned]
    rebuilt = sum(value.nbytes for value in owned if value.producer in rebuildable)
    assert rebuilt / sum(value.nbytes for value in owned) >= share


def test_frozen_parameters_and_input_without_grad():
    block, (x,), kwargs = zoo.example("gpt")
    block.qkv.requires_grad_(False)
    block.ln1.weight.requires_grad_(False)
    args = (x.detach(),)
    expected = zoo.gradients(block, args, kwargs)
    run, _ = under(block, record(block, args, kwargs))
    zoo.assert_same_bits(expected, zoo.gradients(block, args, kwargs, run))


@pytest.mark.parametrize("name", ["gpt", "llama", "eager"])
def test_autocast(name):
    block, args, kwargs = zoo.example(name)

    def cast(*args, **kwargs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return block(*args, **kwargs)

    expected = zoo.gradients(block, args, kwargs, cast)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        recording = record(block, args, kwargs)
    run, calls = under(cast, recording)
    zoo.assert_same_bits(expected, zoo.gradients(block, args, kwargs, run))
    assert not any(call.diverged for call in calls)


@pytest.mark.parametrize("name", ["gpt", "llama", "eager", "bert"])
def test_bfloat16(name):
    block, (x,), kwargs = zoo.example(name)
    block = block.bfloat16()
    kwargs = torch.utils._pytree.tree_map(lambda t: t.bfloat16() if isinstance(t, torch.Tensor) else t, kwargs)
    args = (x.detach().bfloat16().requires_grad_(),)
    expected = zoo.gradients(block, args, kwargs)
    run, _ = under(block, record(block, args, kwargs))
    zoo.assert_same_bits(expected, zoo.gradients(block, args, kwargs, run))


def test_repeated_partial_and_retained_backward():
    block, args, kwargs = zoo.example("gpt")
    recording = record(block, args, kwargs)
    expected = zoo.repeated_gradients(block, args, kwargs)
    for seed in range(5):
        run, _ = under(block, recording, random_policy(recording, seed))
        zoo.assert_same(expected, zoo.repeated_gradients(block, args, kwargs, run))


def test_router_that_takes_another_turn():
    """Other routing than the recorded one: what the plan does not know is retained, what it dropped is rebuilt."""
    block, args, kwargs = zoo.example("router")
    recording = record(block, args, kwargs)
    other = (torch.randn(2, 5, zoo.WIDTH, requires_grad=True),)
    expected = zoo.gradients(block, other, kwargs)
    for seed in range(10):
        run, calls = under(block, recording, random_policy(recording, seed))
        zoo.assert_same_bits(expected, zoo.gradients(block, other, kwargs, run))
        assert calls[0].diverged


def test_value_written_to_after_the_forward_raises():
    block, args, kwargs = zoo.example("bert")
    run, _ = under(block, record(block, args, kwargs))
    x = args[0].detach().clone().requires_grad_()
    h = x * 1.0
    output = run(h)
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an in-place operation"):
        output.sum().backward()


def test_parameter_written_to_that_only_a_replay_reads_raises():
    block, args, kwargs = zoo.example("gpt")
    run, _ = under(block, record(block, args, kwargs))
    output = run(*args, **kwargs)
    with torch.no_grad():
        block.fc1.bias.add_(1)
    with pytest.raises(RuntimeError, match=r"a parameter of shape \(128,\).*modified by an in-place operation"):
        output.sum().backward()


@pytest.mark.parametrize("error", [TypeError, ValueError, IndexError, AssertionError])
def test_operator_whose_replay_raises_is_not_replayed(monkeypatch, error):
    def replay(op, root, parameters):
        if op.short_name == "gelu":
            raise error("no")
        return ds_adacc.program.replay.replay(op, root, parameters)

    monkeypatch.setattr(ds_adacc.record.replayable.verify, "replay", replay)
    recording = record(*zoo.example("gpt"))
    refusals = [op.refusal for op in recording.ops if op.short_name == "gelu"]
    assert refusals == [f"its replay fails: {error.__name__}: no"]


def test_a_chain_of_more_values_than_python_allows_calls_within_each_other(few_calls):
    """As a scan over the steps of a sequence is: each value is rebuilt from the one before."""

    class Scan(nn.Module):
        def forward(self, x):
            for _ in range(sys.getrecursionlimit()):
                x = torch.tanh(x)
            return x

    block, args = Scan(), (torch.randn(2, 3, requires_grad=True),)
    expected = zoo.gradients(block, args, {})
    recording = record(block, args, {})
    policy = planner.recompute_policy(profile_of(recording))
    assert len(recording.segments.replayed(policy.stores)) >= sys.getrecursionlimit() - 1
    run, _ = under(block, recording, policy)
    zoo.assert_same_bits(expected, zoo.gradients(block, args, {}, run))
