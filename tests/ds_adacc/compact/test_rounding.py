"""Stochastic rounding: to a neighbour, right on average, the same for parts; exact values stay."""

import pytest
import torch

from ds_adacc.compact.rounding import round_stochastically

DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [1.0009765, -0.3333333, 3e-8, -2e-8, 65000.1, 0.0, -1.0])
def test_the_mean_is_the_value_and_each_result_a_neighbour(dtype, value):
    count = 20_000
    rounded = round_stochastically(torch.full((count,), value), dtype, 0, key=5).float()
    exact = torch.tensor(value)
    below, above = rounded.min(), rounded.max()
    assert below <= exact <= above
    assert set(rounded.tolist()) == {below.item(), above.item()}
    codes = {below.to(dtype).view(torch.int16).item(), above.to(dtype).view(torch.int16).item()}
    assert max(codes) - min(codes) <= 1 or 0.0 in (below, above)  # there are two zeros
    gap = (above - below).item()
    mean = rounded.double().mean().item()
    assert abs(mean - exact.item()) <= 5 * gap / count**0.5
    if exact == exact.to(dtype).float():
        assert torch.equal(rounded, torch.full((count,), value))


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_round_as_the_whole_does(dtype):
    values = torch.randn(101, generator=torch.Generator().manual_seed(0))
    whole = round_stochastically(values, dtype, 0, key=9)
    parts = [round_stochastically(values[start : start + 13], dtype, start, key=9) for start in range(0, 101, 13)]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, round_stochastically(values, dtype, 0, key=10))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays(dtype):
    rounded = round_stochastically(torch.tensor([float("inf"), float("-inf"), float("nan")]), dtype, 0, key=1)
    assert rounded[0] == float("inf")
    assert rounded[1] == float("-inf")
    assert rounded[2].isnan()
