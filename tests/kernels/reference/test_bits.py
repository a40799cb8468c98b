import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_adacc.kernels import is_two_valued, make_codec
from ds_adacc.kernels.reference.bits import TILE

DTYPES = [torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64]
CODEC = make_codec("bits", backend="reference", group_size=2)


def same_bits(x, y):
    return x.dtype == y.dtype and x.view(-1).view(torch.uint8).tolist() == y.view(-1).view(torch.uint8).tolist()


def restore(x):
    return CODEC.decompress(CODEC.compress(x), x.shape, x.dtype)


def test_the_first_element_is_the_lowest_bit():
    x = torch.tensor([1, 0, 0, 1, 0, 0, 0, 1, 0, 1], dtype=torch.bool)
    bits, values = CODEC.compress(x)
    assert bits.tolist() == [0b10001001, 0b00000010]
    assert values.tolist() == [False, True]


def test_dropout_noise_comes_back():
    x = torch.tensor([0.0, 1.25, 1.25, 0.0, 1.25])
    bits, values = CODEC.compress(x)
    assert bits.tolist() == [0b10110]
    assert values.tolist() == [0.0, 1.25]
    assert torch.equal(CODEC.decompress((bits, values), x.shape, x.dtype), x)


@pytest.mark.parametrize("numel", [TILE, TILE + 1, 20 * TILE - 3])
def test_each_tile_has_two_values_of_its_own(numel):
    tile = torch.arange(numel) // TILE
    x = torch.where(torch.arange(numel) % 3 == 0, tile, -1 - tile).float()
    bits, values = CODEC.compress(x)
    assert len(values) == 2 * -(-numel // TILE)
    assert values[:2].tolist() == [0.0, -1.0] or values[:2].tolist() == [-1.0, 0.0]
    assert same_bits(CODEC.decompress((bits, values), x.shape, x.dtype), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(flags=st.lists(st.booleans(), min_size=1, max_size=70))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_lossless(dtype, flags):
    x = torch.tensor(flags).to(dtype) / 0.9 if dtype != torch.bool else torch.tensor(flags)
    x = x.to(dtype)
    assert same_bits(restore(x), x)
    assert (
        CODEC.compress(x)[0].tolist()
        == [sum(flag << bit for bit, flag in enumerate(flags[start : start + 8])) for start in range(0, len(flags), 8)]
        or len(set(flags)) == 1
    )


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize(
    "values",
    [(0.0, -0.0), (torch.nan, 1.0), (torch.inf, -torch.inf), (-1.0, 1.0), (-3.0, -2.0), (5e-8, 0.0)],
    ids=str,
)
def test_values_are_told_apart_by_their_bits(dtype, values):
    x = torch.tensor([values[i] for i in (0, 1, 1, 0, 1, 0, 0, 0, 0, 1, 1)], dtype=dtype)
    assert is_two_valued(x)
    assert same_bits(restore(x), x)


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, torch.nan])
def test_constants_come_back(value, shape, dtype):
    x = torch.full(shape, value, dtype=dtype)
    assert same_bits(restore(x), x)


def test_two_valued():
    assert is_two_valued(torch.tensor([True, False]))
    assert is_two_valued(torch.tensor([0.0, 1.1, 0.0]))
    assert is_two_valued(torch.tensor(3.0))
    assert is_two_valued(torch.empty(0))
    assert not is_two_valued(torch.tensor([0.0, 1.0, 2.0]))
    x = torch.zeros(1 << 19)
    x[-1], x[1 << 18] = 1, 2
    assert not is_two_valued(x)
