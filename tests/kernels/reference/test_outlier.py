import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_adacc.kernels import make_codec

FLOAT32 = st.floats(width=32, min_value=-(2.0**100), max_value=2.0**100)


def outlier_codec(channels, group_size=6, suffix=""):
    indices = torch.tensor(channels, dtype=torch.int64)
    return make_codec("outlier" + suffix, backend="reference", group_size=group_size, channels=indices)


def group_codec(group_size=6, suffix=""):
    return make_codec("group" + suffix, backend="reference", group_size=group_size)


@pytest.mark.matrix
@pytest.mark.parametrize("size", [(9, 5), (3, 7, 11), (257, 131), (1, 7), (7,)], ids=str)
@pytest.mark.parametrize("channels", [[], [0], [4], [3, 1]], ids=str)
@pytest.mark.parametrize("suffix", ["", "8"])
def test_payload_is_the_group_codecs_of_the_rest_and_the_raw_channels(kit, size, channels, dtype, suffix):
    x = kit.sample("outlier", size, dtype)
    rest = x.clone()
    rest[..., channels] = 0
    codes, scales, raw, indices = outlier_codec(channels, suffix=suffix).compress(x)
    expected = group_codec(suffix=suffix).compress(rest)
    assert torch.equal(codes, expected[0])
    assert torch.equal(scales, expected[1])
    assert torch.equal(raw, x.view(-1, size[-1])[:, channels])
    assert (indices.dtype, indices.tolist()) == (torch.int32, channels)


@pytest.mark.parametrize("channels", [[], [0], [4], [3, 1]], ids=str)
@pytest.mark.parametrize("suffix", ["", "8"])
def test_outliers_come_back_exactly_and_the_rest_as_from_the_group_codec(kit, channels, dtype, suffix):
    x = kit.sample("outlier", (50, 7), dtype)
    rest = x.clone()
    rest[:, channels] = 0
    expected = kit.restore(group_codec(suffix=suffix), rest)
    expected[:, channels] = x[:, channels]
    assert torch.equal(kit.restore(outlier_codec(channels, suffix=suffix), x), expected)


def test_decompression_believes_the_payload_not_the_codec():
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    payload = outlier_codec([2]).compress(x)
    other = outlier_codec([5]).decompress(payload, x.shape, x.dtype)
    assert torch.equal(other, outlier_codec([2]).decompress(payload, x.shape, x.dtype))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_non_finite_outliers_harm_no_group(kit, value):
    x = torch.randn(30, 8, generator=torch.Generator().manual_seed(0))
    x[4, 3] = value
    y = kit.restore(outlier_codec([3]), x)
    assert torch.equal(y[:, 3], x[:, 3]) or y[4, 3].isnan()
    assert y.isfinite().sum() == x.numel() - 1


def test_separation_saves_the_normal_channels(kit):
    x = torch.randn(512, 256, generator=torch.Generator().manual_seed(0))
    x[:, [17, 200]] *= 100
    normal = [c for c in range(256) if c not in (17, 200)]
    separated, grouped = kit.restore(outlier_codec([17, 200], 128), x), kit.restore(group_codec(128), x)
    assert kit.relative_error(x[:, normal], separated[:, normal]) == pytest.approx(0.103, abs=0.003)
    assert kit.relative_error(x[:, normal], grouped[:, normal]) > 0.5


@given(
    numbers=st.lists(FLOAT32, min_size=1, max_size=60),
    width=st.integers(1, 6),
    channel=st.integers(0, 5),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_any_shape_and_channel(numbers, width, channel):
    x = torch.tensor(numbers)[: len(numbers) // width * width].view(-1, width)
    channels = [channel] if channel < width else []
    codec = outlier_codec(channels, 4)
    payload = codec.compress(x)
    y = codec.decompress(payload, x.shape, x.dtype)
    assert torch.equal(y[:, channels], x[:, channels])
    step = payload[1].abs().repeat_interleave(4)[: x.numel()].view(x.shape)
    assert ((x - y).abs() <= step * (1 + 1e-6) + 1e-37).all()
