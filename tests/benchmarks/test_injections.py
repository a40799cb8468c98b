"""Injections change what backward needs, not the function, and the entries that carry them do not train."""

import copy

import pytest
import torch
from injections import DEAD_UNITS, INJECTIONS, dead_units, inject, kill_units
from torch import nn
from train import GPT

INJECTED = [name for name in INJECTIONS if name != "plain"]


def model():
    """A GPT in double precision with parameters that are nowhere zero, except the weights of its dead units."""
    torch.manual_seed(0)
    gpt = GPT(layers=2, width=256, heads=4, context=16).double()
    for parameter in gpt.parameters():
        nn.init.normal_(parameter, std=0.2)
    kill_units(gpt)
    return gpt


def logits(gpt, tokens):
    found = []
    handle = gpt.head.register_forward_hook(lambda module, args, output: found.append(output))
    gpt(tokens, tokens)
    handle.remove()
    return found[0].detach()


TOKENS = torch.arange(32).view(2, 16)


@pytest.mark.parametrize("name", INJECTED)
def test_the_function_is_unchanged_to_rounding(name):
    gpt = model()
    before = logits(gpt, TOKENS)
    inject(gpt, INJECTIONS[name])
    after = logits(gpt, TOKENS)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-9 * before.abs().max().item())


def test_a_block_sees_the_outliers():
    gpt = model()
    seen = {}
    block = gpt.blocks[1]
    for name, module in (("norm", block.norm1), ("qkv", block.attention.qkv), ("unit", block.mlp[1])):
        module.register_forward_hook(lambda module, args, output, name=name: seen.update({name: output.detach()}))
    logits(gpt, TOKENS)
    plain = dict(seen)
    inject(gpt, INJECTIONS["all"])
    logits(gpt, TOKENS)
    far = {name: ((seen[name] - plain[name]).abs() > 30).flatten(0, 1).all(0).sum().item() for name in seen}
    assert far == {"norm": 4, "qkv": 8, "unit": DEAD_UNITS}  # 2 of each 128 channels, 2 of each of 4 heads


@pytest.mark.parametrize("name", list(INJECTIONS))
def test_frozen_entries_stay_as_they_are_and_all_others_train(name):
    gpt = model()
    frozen = inject(gpt, INJECTIONS[name])
    before = copy.deepcopy(gpt)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        gpt(TOKENS, TOKENS).backward()
        frozen.silence()
        optimizer.step()
        frozen.restore()
    block, old = gpt.blocks[0], before.blocks[0]
    injection, units = INJECTIONS[name], dead_units(block.mlp)
    held = {parameter: (block.get_parameter(parameter) == old.get_parameter(parameter)) for parameter in PARAMETERS}
    assert held["mlp.2.weight"][:, units].all() and held["mlp.2.weight"].sum() == 256 * DEAD_UNITS
    assert held["norm1.bias"].sum() == held["norm2.bias"].sum() == (4 if injection.norm else 0)
    assert held["attention.qkv.weight"].sum() == (4 * 768 if injection.norm else 0)
    assert held["attention.qkv.bias"][256:512].sum() == (8 if injection.key else 0)
    assert held["mlp.0.bias"][units].all() or not injection.units
    assert not held["attention.projection.weight"].any()


PARAMETERS = ("norm1.bias", "norm2.bias", "attention.qkv.weight", "attention.qkv.bias", "attention.projection.weight")
PARAMETERS += ("mlp.0.bias", "mlp.2.weight")


def test_dead_units_make_no_difference():
    torch.manual_seed(0)
    gpt = GPT(layers=1, width=256, heads=4, context=16)
    kill_units(gpt)
    before = logits(gpt, TOKENS)
    gpt.blocks[0].mlp[0].weight.data[dead_units(gpt.blocks[0].mlp)] = 7.0
    assert torch.equal(logits(gpt, TOKENS), before)
