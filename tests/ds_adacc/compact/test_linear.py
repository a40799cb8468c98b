"""The layer: exact outputs and input gradients, the projected weight gradient, and what it saves."""

import copy

import pytest
import torch
from compact_reference import matrix
from torch import nn

from ds_adacc.compact.linear import CompactLinear, serve
from ds_adacc.compact.projection import draw
from ds_adacc.compact.shared import Shared

SHAPES = [(5, 32), (3, 7, 32), (2, 3, 4, 32), (32,)]


def pair(bias=True, rank=8, dtype=torch.float32):
    """A plain layer, and one with the same weights that is served."""
    torch.manual_seed(0)
    plain = nn.Linear(32, 48, bias=bias, dtype=dtype)
    layer = serve(copy.deepcopy(plain), rank, Shared(1))
    layer.rows, layer.columns = draw(3, "x", 0, 32, rank)
    return plain, layer


def gradients(layer, x, by, autocast=False):
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = layer(input=x)  # by the name that nn.Linear gives it
    output.backward(by.to(output.dtype))
    return output.detach(), x.grad, None if layer.bias is None else layer.bias.grad


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mode", ["float32", "bfloat16", "autocast"])
def test_outputs_and_all_other_gradients_are_bit_identical(shape, bias, mode):
    dtype = torch.bfloat16 if mode == "bfloat16" else torch.float32
    plain, layer = pair(bias, dtype=dtype)
    x, by = torch.randn(shape, dtype=dtype), torch.randn(*shape[:-1], 48, dtype=dtype)
    for one, other in zip(*(gradients(each, x, by, mode == "autocast") for each in (plain, layer)), strict=True):
        assert one is other is None or (torch.equal(one, other) and one.dtype is other.dtype)
    exact = plain.weight.grad.float() @ matrix(3, "x", 0, 32, 8)
    error = (layer.compact_update.grad.float() - exact).norm() / exact.norm()
    assert error < (1e-6 if mode == "float32" else 1e-2)
    assert layer.weight.grad is None


@pytest.mark.parametrize("rows", [(5, 3), (7, 1), (33, 2), (3, 0)])
@pytest.mark.parametrize("what", ["input", "gradient"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mode", ["float32", "bfloat16", "autocast"])
def test_bits_are_the_same_if_memory_is_in_another_order(rows, what, bias, mode):
    """Where no gradient reaches the weight, torch multiplies such tensors in another way, with other rounding."""
    dtype = torch.bfloat16 if mode == "bfloat16" else torch.float32
    plain, layer = pair(bias, dtype=dtype)
    x, by = torch.randn(*rows, 32, dtype=dtype), torch.randn(*rows, 48, dtype=dtype)
    if what == "input":
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    else:
        by = by.transpose(0, 1).contiguous().transpose(0, 1)
    for one, other in zip(*(gradients(each, x, by, mode == "autocast") for each in (plain, layer)), strict=True):
        assert one is other is None or torch.equal(one, other)


def test_only_the_projection_is_saved_beside_the_weight():
    _, layer = pair()
    x, saved = torch.randn(5, 32, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        layer(x)
    assert [tuple(tensor.shape) for tensor in saved] == [(5, 8), (48, 32)]
    assert saved[1].data_ptr() == layer.weight.data_ptr()
    assert saved[0].untyped_storage().nbytes() == 5 * 8 * 4


def test_a_frozen_proxy_saves_nothing():
    _, layer = pair()
    layer.compact_update.requires_grad_(False)
    x, saved = torch.randn(5, 32, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        output = layer(input=x)  # by the name that nn.Linear gives it
    output.sum().backward()
    assert [tuple(tensor.shape) for tensor in saved] == [(48, 32)]
    assert layer.compact_update.grad is None


def test_the_output_may_be_written_to():
    plain, layer = pair()
    x = torch.randn(5, 32, requires_grad=True)
    layer(x).relu_().sum().backward()
    mine, x.grad = x.grad, None
    plain(x).relu_().sum().backward()
    assert torch.equal(mine, x.grad)


def test_the_layer_is_a_plain_linear_to_state_dicts_and_evaluation():
    plain, layer = pair()
    assert isinstance(layer, nn.Linear)
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert layer.load_state_dict(nn.Linear(32, 48).state_dict()) == plain.load_state_dict(plain.state_dict())
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(5, 32)
    with torch.no_grad():
        assert torch.equal(layer(x), plain(x))
    assert "rank=8" in repr(layer)
    assert type(copy.deepcopy(layer)) is CompactLinear
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict({})
