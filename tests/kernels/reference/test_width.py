"""What INT8 costs and brings beside INT4."""

import pytest
import torch

from ds_adacc.kernels import ROUNDINGS, SCALES, make_codec
from ds_adacc.kernels.width import INT4, INT8


def test_codes_fill_whole_bytes():
    assert (INT4.half, INT8.half) == (8, 128)
    assert [INT4.code_bytes(n) for n in (0, 1, 2, 7)] == [0, 1, 1, 4]
    assert [INT8.code_bytes(n) for n in (0, 1, 2, 7)] == [0, 1, 2, 7]
    assert (INT4.code_slice(slice(6, 9)), INT8.code_slice(slice(6, 9))) == (slice(3, 5), slice(6, 9))


def gaussian(generator):
    return torch.randn(512, 512, generator=generator)


def laplace(generator):
    uniform = torch.rand(512, 512, generator=generator, dtype=torch.float64).clamp(1e-12)
    return torch.distributions.Laplace(0.0, 1.0).icdf(uniform).float()


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("form", ["group", "token", "channel", "asymmetric", "outlier"])
@pytest.mark.parametrize("draw", [gaussian, laplace])
def test_four_bits_more_leave_a_sixteenth_of_the_error(kit, draw, form, scale, rounding):
    x = draw(torch.Generator().manual_seed(0))
    options = {"channels": torch.tensor([7, 300]) if form == "outlier" else None, "scale": scale, "rounding": rounding}
    torch.manual_seed(0)
    codecs = [make_codec(form + suffix, backend="reference", group_size=128, **options) for suffix in ("", "8")]
    narrow, wide = (kit.relative_error(x, kit.restore(codec, x)) for codec in codecs)
    assert 12 < narrow / wide < 20


def test_the_payload_has_a_byte_an_element():
    for name, codes in (("group", 5), ("group8", 9)):
        codec = make_codec(name, backend="reference", group_size=4)
        assert codec.payload_bytes((3, 3), torch.float16) == codes + 4 * 3
