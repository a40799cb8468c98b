"""A ZeRO-3 leaf module always has a positional argument that requires a gradient."""

import pytest
import torch
import zoo
from torch import nn

from ds_adacc.config import load
from ds_adacc.engine.zero3 import make_leaves
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


def test_a_block_without_any_is_refused():
    with pytest.raises(ValueError, match="the block Seen takes no floating-point tensor by position"):
        leaf(Seen())(torch.ones(2, dtype=torch.bool))


def compiled_and_wrapped(block):
    block.forward = torch.compile(block.forward, backend="aot_eager")
    wrap_blocks({"block": block}, Runtime(load({"adacc": {}}), stepped=True))


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
