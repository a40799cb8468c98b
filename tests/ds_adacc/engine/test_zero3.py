"""Blocks as leaf modules of ZeRO-3: which and when, what they are given, and how they may be used."""

import deepspeed
import pytest
import torch
import zoo
from launch import told_by
from leaves_worker import STEPS, USES, Mixture
from torch import nn

from ds_adacc.config import load
from ds_adacc.engine.zero3 import make_leaves, mixtures
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.runtime.wrap import wrap_blocks


class Seen(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, mask, x=None):
        self.required = None if x is None else x.requires_grad
        return mask if x is None else self.fc(x)


def leaf(module):
    make_leaves([module])
    module.register_forward_pre_hook(lambda module, args: setattr(module, "given", args))
    return module


def test_an_input_behind_a_frozen_embedding_gets_one():
    block, x = leaf(zoo.GPTBlock()), torch.randn(2, 8, zoo.WIDTH)
    block(x)
    assert block.given[0].requires_grad and not x.requires_grad
    assert block.given[0].data_ptr() == x.data_ptr()


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_keyword_becomes_positional(requires_grad):
    block, mask = leaf(Seen()), torch.ones(2, dtype=torch.bool)
    block(mask, x=torch.randn(2, 4, requires_grad=requires_grad))
    assert len(block.given) == 2 and block.required


def test_what_needs_none_is_left_alone():
    block, x = leaf(Seen()), torch.randn(2, 4)
    with torch.no_grad():
        block(torch.ones(2, dtype=torch.bool), x)
    assert not block.required
    block.requires_grad_(False)
    block(torch.ones(2, dtype=torch.bool), x)
    assert not block.required


@pytest.mark.parametrize("prepare", [lambda block: block, torch.compile], ids=["plain", "compiled"])
def test_a_block_without_any_is_refused(prepare):
    with pytest.raises(ValueError, match="the block Seen takes no floating-point tensor by position"):
        leaf(prepare(Seen()))(torch.ones(2, dtype=torch.bool))


def compiled_and_wrapped(block):
    block.forward = torch.compile(block.forward, backend="aot_eager")
    wrap_blocks({"block": block}, Runtime(load({"adacc": {}}), has_engine=True))


def test_the_forward_may_be_compiled_and_wrapped_later():
    block, x = leaf(zoo.GPTBlock(dropout=0.0)), torch.randn(2, 8, zoo.WIDTH)
    plain = block(x)
    compiled_and_wrapped(block)
    assert torch.equal(block(x), plain)
    assert block.given[0].requires_grad and len(block.given) == 1


def test_a_graph_compiled_around_the_block_breaks_there():
    block, x = leaf(zoo.GPTBlock(dropout=0.0)), torch.randn(2, 8, zoo.WIDTH)
    plain = 2 * block(x)
    compiled_and_wrapped(block)
    around = torch.compile(nn.Sequential(block), backend="aot_eager")
    assert torch.equal(2 * around(x), plain)
    assert block.given[0].requires_grad and len(block.given) == 1


ranks = told_by("leaves_worker")


@pytest.mark.ranks
@pytest.mark.parametrize("use", USES)
def test_losses_are_bit_identical(ranks, use):
    for rank in ranks:
        assert len(rank[use]["plain"]["losses"]) == STEPS
        assert rank[use]["adacc"]["losses"] == rank[use]["plain"]["losses"]


@pytest.mark.ranks
def test_a_block_called_with_keywords_is_released_when_its_backward_ends(ranks):
    for rank in ranks:
        assert rank["keywords"]["adacc"]["gathered"] == rank["keywords"]["plain"]["gathered"] != []


class Adapted(nn.Module):
    """A block with one adapter, as peft makes it, and parts of several classes in a list."""

    def __init__(self):
        super().__init__()
        self.adapter = nn.ModuleDict({"default": nn.Linear(4, 4)})
        self.parts = nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(), nn.Dropout()])


class Compiled(nn.Module):
    """A block with a list of compiled parts of several classes."""

    def __init__(self):
        super().__init__()
        parts = nn.Linear(4, 4), nn.LayerNorm(4)
        self.parts = nn.ModuleList(torch.compile(part, backend="aot_eager") for part in parts)


def marked(block):
    deepspeed.utils.set_z3_leaf_module(block.fc1, True)
    return block


CONFIGURED = {"zero_optimization": {"leaf_module": {"classes": ["GPTBlock"]}}}


@pytest.mark.parametrize(
    ("block", "ds_config", "is_mixture"),
    [
        (zoo.GPTBlock(), {}, False),
        (Adapted(), {}, False),
        (Compiled(), {}, False),
        (Mixture(), {}, True),
        (marked(zoo.GPTBlock()), {}, True),
        (zoo.GPTBlock(), CONFIGURED, True),
    ],
    ids=["GPT", "adapter", "compiled parts", "mixture", "marked", "configured"],
)
def test_mixtures_are_told_by_their_lists_of_experts_and_leaf_modules(block, ds_config, is_mixture):
    assert mixtures(nn.Sequential(block), [block], ds_config) == ([block] if is_mixture else [])
