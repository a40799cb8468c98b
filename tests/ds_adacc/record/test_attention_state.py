"""Fused attention returns a random state, in memory that nobody writes without dropout: it is replayed all the same.

The tests count the replays, so that a refusal cannot hide behind right gradients.
"""

import attention
import pytest
import torch
import zoo
from recorded import profile_of, record, under
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_adacc import planner
from ds_adacc.program.schema import reveals_data

KINDS = (*attention.OPERATORS, "function", "padded")
STATES = {"flash": 2, "cudnn": 2, "efficient": 2, "flash_attn": 1, "function": 1, "padded": 1}


def block_of(kind, dropout=False):
    torch.manual_seed(0)
    width = 12 if kind == "padded" else 16
    return attention.Block(kind, dropout, width), (torch.randn(2, 9, width, requires_grad=True),)


def runs(kind):
    return int(attention.RUNS["flash_attn" if kind in ("function", "padded") else kind])


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_never_refused_and_its_state_is_always_retained(kind, dropout):
    block, args = block_of(kind, dropout)
    recordings = [record(block, args, {}) for _ in range(3)]
    assert len({recording.digest for recording in recordings}) == 1
    recording = recordings[0]
    assert {op.short_name: op.refusal for op in recording.ops if op.refusal} == {}
    states = [value for value in recording.values if value.origin == "state"]
    assert len(states) == STATES[kind]
    assert all(value.producer is None and not value.owned for value in states)
    policy = planner.recompute_policy(profile_of(recording))
    assert [policy.stores[value.index] for value in states] == [planner.RETAIN] * len(states)
    retained = [i for i, store in enumerate(policy.stores) if store is not None]
    origins = [recording.values[i].origin for i in retained]
    assert sorted(set(origins)) == sorted({"input", "state", *(["generator"] if dropout else [])})


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_have_the_same_bits_and_attention_is_replayed_once(kind, dropout):
    block, args = block_of(kind, dropout)
    expected = zoo.gradients(block, args, {})
    recording = record(block, args, {})
    run, calls = under(block, recording)
    for _ in range(3):
        before = runs(kind)
        zoo.assert_same_bits(expected, zoo.gradients(block, args, {}, run))
        assert runs(kind) == before + 2, "once in forward, once in backward"
        assert not calls[-1].diverged
    # all but the second matmul of the MLP and the sum after it, which backward does not need
    assert len(recording.segments.replayed(calls[-1].bound.policy.stores)) == len(recording.ops) - 2


def test_a_state_that_an_operator_reads_is_not_rebuilt_for_it():
    def block(x):
        out, lse, seed, _ = attention.efficient(x, x, x, False)
        return (out + seed.bitwise_and(1)).sin() * lse[..., None].exp()

    args = (torch.randn(2, 2, 9, 8, requires_grad=True),)
    recording = record(block, args, {})
    refused = {op.short_name: op.refusal for op in recording.ops if op.refusal}
    assert refused.keys() <= {"bitwise_and"}, "autograd saves the state, so what reads it can be replayed"


def test_a_first_output_of_one_number_is_no_state():
    def block(x):
        return (x * torch.randint(1, 5, (1,))).sin()

    recording = record(block, (torch.randn(4, 4, requires_grad=True),), {})
    assert [value.origin for value in recording.values] == ["input", "generator", "generator", "made", "made", "made"]
    assert all(op.replayable for op in recording.ops)


def test_a_state_on_the_host_reveals_no_data():
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(2, 2, 9, 8, device="cuda")
        seed, read = torch.empty((), dtype=torch.int64), torch.empty(4, dtype=torch.int64)
        given, made = ((q, q, q, False), {}), (torch.empty_like(q), torch.empty(2, 2, 9, device="cuda"))
        operator = torch.ops.ds_adacc_tests.efficient.default
        assert not reveals_data(operator, given, (*made, seed, seed))
        assert reveals_data(operator, given, (*made, seed, read)), "four numbers are no state"
        assert reveals_data(torch.ops.aten._to_copy.default, ((q,), {}), (seed,))
