import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_adacc.kernels import SCALES, make_codec

TINY = np.finfo(np.float32).tiny
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def oracle(numbers, length, scale_kind="extreme", half=8):
    """Codes and scales by the formula, number by number."""
    codes, scales = [], []
    for start in range(0, len(numbers), length):
        group = [np.float32(x) for x in numbers[start : start + length]]
        low, high = min(group), max(group)
        scale = (high if high > -low else low) / np.float32(-half)
        if scale_kind == "paper":
            scale = max(high, -low) / np.float32(half)
        if abs(scale) < TINY:
            scale = np.float32(0)
        inverse = np.float32(1) / scale if scale else np.float32(0)
        codes += [min(half - 1, max(-half, int(np.rint(x * inverse)))) for x in group]
        scales.append(scale)
    return codes, scales


def codec_and_length(name, shape, group_size, scale="extreme"):
    codec = make_codec(name, backend="reference", group_size=group_size, scale=scale)
    return codec, group_size if codec.form == "group" else (shape[-1] if shape else 1)


@pytest.mark.matrix
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["group", "token", "group8", "token8"])
def test_payload_and_result_are_the_formula_to_the_bit(kit, name, shape, dtype, scale):
    x = kit.sample(name, shape, dtype)
    codec, length = codec_and_length(name, shape, 6, scale)
    codes, scales = oracle(x.float().view(-1).tolist(), length, scale, codec.width.half)
    payload = codec.compress(x)
    assert payload[0].tolist() == kit.stored(codes, codec.width)
    assert payload[1].numpy().tobytes() == np.array(scales, np.float32).tobytes()
    expected = [np.float32(code) * scales[i // length] for i, code in enumerate(codes)]
    expected = torch.tensor(np.array(expected, np.float32)).to(dtype).view(shape)
    assert torch.equal(codec.decompress(payload, x.shape, dtype), expected)


def test_a_known_group():
    x = torch.tensor([4.0, -2.0, 1.0, 0.26, 3.9, 0.0, -4.0, 4.0])
    codec = make_codec("group", backend="reference", group_size=6)
    codes, scales = codec.compress(x)
    assert scales.tolist() == [-0.5, 0.5]
    assert [f"{byte:02x}" for byte in codes.tolist()] == ["c0", "76", "80", "f0"]
    restored = codec.decompress((codes, scales), x.shape, x.dtype)
    assert restored.tolist() == [4.0, -2.0, 1.0, 0.5, 4.0, 0.0, -4.0, 3.5]


@pytest.mark.parametrize("name", ["group", "token", "group8", "token8"])
@given(numbers=st.lists(FLOAT32, min_size=1, max_size=40), columns=st.integers(1, 5))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_the_error_is_half_a_step_or_a_clipped_step(name, numbers, columns):
    x = torch.tensor(numbers)[: len(numbers) // columns * columns].view(-1, columns)
    codec, length = codec_and_length(name, x.shape, 4)
    payload = codec.compress(x)
    y = codec.decompress(payload, x.shape, x.dtype)
    scale = payload[1].double().repeat_interleave(length)[: x.numel()].view(x.shape)
    error = (x.double() - y.double()).abs()
    half = codec.width.half
    opposite = x.double() / scale > half - 0.5 - 1e-5
    allowed = torch.where(opposite, scale.abs(), scale.abs() / 2) * (1 + 1e-6)
    assert (error <= torch.where(scale == 0, half * float(TINY), allowed)).all()


@pytest.mark.parametrize("name", ["group", "group8"])
@given(numbers=st.lists(FLOAT32, min_size=4, max_size=4))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_the_extreme_comes_back_exactly(name, numbers):
    x = torch.tensor(numbers)
    codec = make_codec(name, backend="reference", group_size=4)
    y = codec.decompress(codec.compress(x), x.shape, x.dtype)
    extreme = x.abs().argmax()
    if x[extreme].abs() >= codec.width.half * TINY and (x.abs() == x[extreme].abs()).sum() == 1:
        assert y[extreme] == x[extreme]


def test_a_known_group_of_bytes():
    x = torch.tensor([4.0, -2.0, 1.0, 0.26, 3.9, 0.0, -4.0, 4.0])
    codec = make_codec("group8", backend="reference", group_size=6)
    codes, scales = codec.compress(x)
    assert scales.tolist() == [-1 / 32, 1 / 32]
    assert [byte - 128 for byte in codes.tolist()] == [-128, 64, -32, -8, -125, 0, -128, 127]
    restored = codec.decompress((codes, scales), x.shape, x.dtype)
    assert restored.tolist() == [4.0, -2.0, 1.0, 0.25, 3.90625, 0.0, -4.0, 3.96875]


def test_the_papers_scale_is_positive_and_clips():
    x = torch.tensor([4.0, -2.0, 1.0, 0.26])
    codec = make_codec("group", backend="reference", group_size=4, scale="paper")
    codes, scales = codec.compress(x)
    assert scales.tolist() == [0.5]
    assert [f"{byte:02x}" for byte in codes.tolist()] == ["4f", "9a"]
    assert codec.decompress((codes, scales), x.shape, x.dtype).tolist() == [3.5, -2.0, 1.0, 0.5]


def test_the_tail_has_a_scale_of_its_own():
    x = torch.cat([torch.full((6,), 100.0), torch.tensor([0.3, -0.1, 0.2])])
    codec = make_codec("group", backend="reference", group_size=6)
    y = codec.decompress(codec.compress(x), x.shape, x.dtype)
    torch.testing.assert_close(y[6:], x[6:], atol=0.3 / 16, rtol=0)


@pytest.mark.parametrize(
    ("draw", "paper", "anchored"),
    [
        (lambda x: x, 0.106, 0.103),
        (lambda x: torch.distributions.Laplace(0.0, 1.0).icdf((x / 2**0.5).erf() / 2 + 0.5), 0.144, 0.141),
        (torch.nn.functional.gelu, 0.169, 0.162),
        (lambda x: (2 * x).softmax(-1), 0.168, 0.126),
    ],
    ids=["gaussian", "laplace", "gelu", "softmax"],
)
def test_anchoring_at_the_signed_extreme_is_better_than_the_paper(kit, draw, paper, anchored):
    x = draw(torch.randn(512, 512, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).float()
    codec = make_codec("group", backend="reference", group_size=128)
    by_paper = kit.restore(make_codec("group", backend="reference", group_size=128, scale="paper"), x)
    assert kit.relative_error(x, by_paper) == pytest.approx(paper, abs=0.002)
    assert kit.relative_error(x, kit.restore(codec, x)) == pytest.approx(anchored, abs=0.002)


@pytest.mark.parametrize("value", [65504.0, -65504.0])
def test_the_greatest_half_comes_back(kit, value):
    x = torch.full((10,), value, dtype=torch.float16)
    x[3] = -value / 2
    assert torch.equal(kit.restore(kit.build("group", x.shape), x), x)


def test_a_poisoned_group_harms_no_other(kit):
    x = torch.ones(2, 7)
    x[0, 6] = torch.nan
    y = kit.restore(kit.build("token", x.shape), x)
    assert y[0].isnan().all()
    assert torch.equal(y[1], x[1])
