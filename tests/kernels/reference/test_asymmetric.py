import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_adacc.kernels import make_codec
from ds_adacc.kernels.reference.asymmetric import STEP
from ds_adacc.kernels.width import INT4, INT8

F = np.float32
FINFO = np.finfo(F)
FLOAT32 = st.floats(min_value=-1.75 * 2**127, max_value=1.75 * 2**127, width=32)


def oracle(numbers, length, width):
    """Codes, scales and offsets by the formula, number by number."""
    codes, scales, offsets, half = [], [], [], width.half
    for start in range(0, len(numbers), length):
        group = [F(x) for x in numbers[start : start + length]]
        low, high = min(group), max(group)
        scale = min((high * F(0.5) - low * F(0.5)) * F(STEP[width]), FINFO.max / F(half))
        if scale < FINFO.tiny:
            scale = F(0)
        offset = low + F(half) * scale
        inverse = F(1) / scale if scale else F(0)
        codes += [min(half - 1, max(-half, int(np.rint((x - offset) * inverse)))) for x in group]
        scales.append(scale)
        offsets.append(offset)
    return codes, scales, offsets


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["asymmetric", "asymmetric8"])
def test_payload_and_result_are_the_formula_to_the_bit(kit, name, shape, dtype):
    x = kit.sample(name, shape, dtype) + 1
    codec = kit.build(name, shape, group_size=6)
    codes, scales, offsets = oracle(x.float().view(-1).tolist(), 6, codec.width)
    payload = codec.compress(x)
    assert payload[0].tolist() == kit.stored(codes, codec.width)
    assert payload[1].numpy().tobytes() == np.array(scales, F).tobytes()
    assert payload[2].numpy().tobytes() == np.array(offsets, F).tobytes()
    expected = np.array([F(code) * scales[i // 6] + offsets[i // 6] for i, code in enumerate(codes)], F)
    assert torch.equal(codec.decompress(payload, x.shape, dtype), torch.tensor(expected).to(dtype).view(shape))


@pytest.mark.parametrize(("width", "steps"), [(INT4, 15), (INT8, 255)])
def test_step_is_two_over_the_number_of_steps_rounded_down(width, steps):
    step = STEP[width]
    assert float(F(step)) == step < 2 / steps < float(np.nextafter(F(step), F(1)))


@pytest.mark.parametrize(
    ("name", "x", "stored", "offset"),
    [
        ("asymmetric", [3.0, 18.0, 10.0, 10.6], "f087", 11.0),
        ("asymmetric8", [3.0, 258.0, 130.0, 11.4], "00ff7f08", 131.0),
    ],
)
def test_minimum_and_maximum_have_the_outermost_codes(name, x, stored, offset):
    codes, scales, offsets = make_codec(name, backend="reference", group_size=4).compress(torch.tensor(x))
    assert bytes(codes.tolist()).hex() == stored
    torch.testing.assert_close((scales, offsets), (torch.tensor([1.0]), torch.tensor([offset])))


@pytest.mark.parametrize("name", ["asymmetric", "asymmetric8"])
@given(numbers=st.lists(FLOAT32, min_size=1, max_size=24))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_error_is_half_a_step(name, numbers):
    x = torch.tensor(numbers)
    codec = make_codec(name, backend="reference", group_size=8)
    payload = codec.compress(x)
    y = codec.decompress(payload, x.shape, x.dtype)
    groups = torch.nn.functional.pad(x, (0, -x.numel() % 8), value=x[-1].item()).view(-1, 8).double()
    scale = payload[1].double().repeat_interleave(8)[: x.numel()]
    magnitude = groups.abs().amax(1).repeat_interleave(8)[: x.numel()]
    half = codec.width.half
    capped = scale == float(FINFO.max / half)
    allowed = torch.where(capped, scale, scale / 2) + 2e-6 * magnitude
    allowed = torch.where(scale == 0, (2 * half - 1) * float(FINFO.tiny), allowed)
    assert ((x.double() - y.double()).abs() <= allowed).all()


@given(numbers=st.lists(st.floats(min_value=0, max_value=1.75 * 2**127, width=32), min_size=1, max_size=16))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_zero_stays_zero_among_numbers_above_it(numbers):
    x = torch.tensor([0.0, *numbers])
    codec = make_codec("asymmetric", backend="reference", group_size=32)
    y = codec.decompress(codec.compress(x), x.shape, x.dtype)
    assert (y[x == 0] == 0).all()


def test_a_narrow_range_far_from_zero():
    x = torch.linspace(1e7, 1e7 + 30, 31)
    codec = make_codec("asymmetric", backend="reference", group_size=32)
    y = codec.decompress(codec.compress(x), x.shape, x.dtype)
    assert (x - y).abs().max() <= 2


@pytest.mark.parametrize(
    ("draw", "paper", "here"),
    [
        (lambda x: x, 0.099, 0.100),
        (torch.nn.functional.gelu, 0.075, 0.076),
        (lambda x: x.softmax(-1), 0.113, 0.115),
        (lambda x: (2 * x).softmax(-1), 0.098, 0.084),
        (lambda x: (4 * x).softmax(-1), 0.068, 0.033),
    ],
    ids=["gaussian", "gelu", "softmax", "softmax of deviation 2", "softmax of deviation 4"],
)
def test_relative_errors_of_the_docstring(kit, draw, paper, here):
    x = draw(torch.randn(512, 512, generator=torch.Generator().manual_seed(0)))
    groups = x.view(-1, 128)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    scale, offset = (high - low) / 16, (high + low) / 2
    by_paper = (((groups - offset) / scale).round().clamp(-8, 7) * scale + offset).view(x.shape)
    assert kit.relative_error(x, by_paper) == pytest.approx(paper, abs=0.002)
    restored = kit.restore(make_codec("asymmetric", backend="reference", group_size=128), x)
    assert kit.relative_error(x, restored) == pytest.approx(here, abs=0.002)
