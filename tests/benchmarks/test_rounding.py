"""The bias of rounding: what the sums say of errors that are known, and what a block's policies compress."""

import math

import pytest
import rounding
import torch
from accuracy_run import Setting, Training

from ds_adacc.config import load
from ds_adacc.profile.codec_maker import CodecMaker

SETTING = Setting(exact=0, steps=0, layers=2, width=128, heads=2, context=32, batch=2)


@pytest.fixture(scope="module")
def seen():
    """A block with split attention, and three draws of what it sees."""
    training = Training(SETTING, seed=0)
    block = training.model.blocks[1]
    block.attention = rounding.SplitAttention(block.attention)
    return block, rounding.draws(training, 1, 3)


def test_a_constant_error_is_all_bias_and_one_that_alternates_is_none():
    exact = torch.tensor([3.0, 4.0]).expand(4, 2)
    errors = torch.tensor([0.0, 5.0]).expand(4, 2)
    constant = rounding.norms(errors, exact)
    assert constant == {"error": 1, "spread": 0, "mean": 1, "chance": 0, "bias": 1, "sigmas": None}
    alternating = rounding.norms(errors * torch.tensor([[1], [-1], [1], [-1]]), exact)
    spread = math.sqrt(4 / 3)
    expected = {"error": 1, "spread": spread, "mean": 0, "chance": spread / 2, "bias": 0, "sigmas": None}
    assert alternating == pytest.approx(expected)


def test_a_bias_beyond_chance_is_found():
    noise = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))
    exact = torch.ones(64, 1000)
    assert abs(rounding.norms(noise, exact)["sigmas"]) < 3
    biased = rounding.norms(noise + 0.1, exact)
    assert biased["sigmas"] > 5
    assert biased["bias"] == pytest.approx(0.1, rel=0.2)


def test_split_attention_computes_the_same():
    training = Training(SETTING, seed=0)
    attention = training.model.blocks[0].attention
    torch.nn.init.normal_(attention.qkv.bias)
    x = torch.randn(2, 32, 128)
    torch.testing.assert_close(rounding.SplitAttention(attention)(x), attention(x))


def test_a_policy_that_compresses_nothing_has_the_exact_gradient(seen):
    block, (draw, *_) = seen
    found = rounding.captured(block, draw)
    bound = rounding.compressing(found, "softmax", CodecMaker(load({"adacc": {"codecs": "paper"}})))  # no such value
    assert torch.equal(rounding.gradient(block, draw, bound), rounding.gradient(block, draw, None))


def test_every_role_of_the_block_is_measured_with_both_roundings(seen):
    block, draws = seen
    rows = rounding.measure(block, draws)
    roles = {"block_input", "linear", "layernorm", "gelu", "query", "key", "value", "attention"}
    assert [(row["role"], row["rounding"]) for row in rows] == [
        (role, each)
        for role in rounding.codecs_for(load({"adacc": {}}))
        if role in roles
        for each in rounding.ROUNDINGS
    ]
    assert all(row["error"] > 0 for row in rows)
    assert "| query | attention.parts.0 out | channel | nearest |" in rounding.table(rows)
