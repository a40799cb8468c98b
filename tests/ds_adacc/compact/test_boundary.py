"""What a step boundary adds to a weight, or to a rank's part of it, in fp32 and in 16 bits."""

import pytest
import torch
from compact_reference import matrix
from torch import nn

from ds_adacc.compact import boundary
from ds_adacc.compact.boundary import _add, add_update
from ds_adacc.compact.linear import serve
from ds_adacc.compact.projection import draw, tiles
from ds_adacc.compact.shared import Shared

SCALE, DECAY = 0.5, 0.01


def layer_of(dtype=torch.float32):
    torch.manual_seed(0)
    layer = serve(nn.Linear(24, 7, dtype=dtype), 4, Shared(1))
    layer.rows, layer.columns = draw(3, "a", 0, 24, 4)
    nn.init.normal_(layer.compact_update, std=1e-3)
    return layer


def expected(layer):
    update = layer.compact_update.detach().float() @ matrix(3, "a", 0, 24, 4).T
    return layer.weight.detach().float() * (1 - DECAY) + SCALE * update


def test_a_weight_gets_the_decay_and_the_update():
    layer = layer_of()
    after = expected(layer)
    assert add_update(layer, SCALE, DECAY, key=0)
    torch.testing.assert_close(layer.weight.detach(), after, rtol=1e-6, atol=1e-8)
    layer.compact_update.data.zero_()
    assert not add_update(layer, SCALE, 0.0, key=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [2, 3, 5, 11])
def test_parts_get_what_the_whole_gets(dtype, ranks, monkeypatch):
    """As ZeRO-3 cuts a weight: equal parts of the flattened weight, the last one padded."""
    layer = layer_of(dtype)
    size = -(-layer.weight.numel() // ranks)
    flat = torch.zeros(ranks * size, dtype=dtype)
    flat[: layer.weight.numel()] = layer.weight.detach().flatten()
    padding = flat[layer.weight.numel() :].clone()
    monkeypatch.setattr(boundary, "tiles", lambda count, width: tiles(count, width, entries=2 * width))
    for rank in range(ranks):
        part = flat[rank * size : (rank + 1) * size]
        _add(part, rank * size, layer.compact_update.detach(), layer, (SCALE, DECAY, 5))
    monkeypatch.undo()
    add_update(layer, SCALE, DECAY, key=5)
    whole = layer.weight.detach().flatten()
    assert torch.equal(flat[layer.weight.numel() :], padding)
    torch.testing.assert_close(flat[: len(whole)], whole, rtol=1e-6 if dtype is torch.float32 else 1e-2, atol=1e-7)
    differ = (flat[: len(whole)] != whole).float().mean()  # products of other shapes round otherwise, rarely
    assert dtype is torch.float32 or differ < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_small_updates_are_right_on_average(dtype):
    layer = layer_of(dtype)
    before, after = layer.weight.detach().clone(), expected(layer)
    nearest = (after.to(dtype).float() - after).abs().mean()
    draws = 400
    mean = torch.zeros_like(after)
    for key in range(draws):
        layer.weight.data.copy_(before)
        add_update(layer, SCALE, DECAY, key)
        mean += layer.weight.detach().float() / draws
    assert (mean - after).abs().mean() < 0.2 * nearest
