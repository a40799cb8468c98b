"""The CUDA codecs, their kernels run by the emulator, give the reference's bits: payloads and results.

The emulator also fails a test for a byte read or written where it must not be, races and diverging warps.
"""

import math
from pathlib import Path

import pytest
import torch
from device_memory import DeviceMemory
from emulation import EmulatedKernels
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ds_adacc.kernels
from ds_adacc.kernels import CODECS, ROUNDINGS, SCALES, cuda, make_codec, rank_outliers, reference, separates_outliers
from ds_adacc.kernels.codec import make
from ds_adacc.kernels.reference.bits import TILE

SOURCES = Path(ds_adacc.kernels.__file__).parent / "cuda" / "sources"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = {name: reference.BitsCodec.dtypes if name == "bits" else FLOATS for name in CODECS}
CODECS_AND_DTYPES = [
    pytest.param(name, dtype, id=f"{name}-{str(dtype)[6:]}") for name in CODECS for dtype in DTYPES[name]
]
WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WIDE = [name for name in CODECS if name.endswith("8")]
NARROW_AND_DTYPES = [param for param in CODECS_AND_DTYPES if param.values[0] not in WIDE]
GROUP_SIZES = (2, 6, 8, 16, 32, 64, 100, 128, 256, 1000, 5000)
EXTENTS = (1, 2, 3, 7, 8, 16, 31, 64, 72, 127, 128, 129, 131, 256, 257, 1009, 4104, 5003)
MOST = 12_000  # elements
SETTINGS = settings(
    max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)

shapes = st.lists(st.sampled_from(EXTENTS), max_size=4).filter(lambda shape: math.prod(shape) <= MOST)


def normal(shape, generator):
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def mixed_magnitudes(shape, generator):
    low, high = [(-24, 15), (-148, 127)][int(torch.randint(2, (), generator=generator))]
    return torch.ldexp(normal(shape, generator), torch.randint(low, high, shape, generator=generator))


def tiny(shape, generator):
    return normal(shape, generator) * 2.0 ** float(torch.randint(-149, -10, (), generator=generator))


def constant(shape, generator):
    return torch.full(shape, float(normal((), generator)), dtype=torch.float64)


def zeros(shape, generator):
    return torch.randint(0, 2, shape, generator=generator).double() * -0.0 + 0.0 * normal(shape, generator)


def ties(shape, generator):
    return torch.randint(-16, 17, shape, generator=generator).double() / 2


def ties_of_bytes(shape, generator):
    return torch.randint(-256, 257, shape, generator=generator).double() / 2


def extremes_of_both_signs(shape, generator):
    return (torch.randint(0, 3, shape, generator=generator) - 1).double() * 3.5


def one_sided(shape, generator):
    return normal(shape, generator).abs() + 1


def largest(shape, generator):
    return normal(shape, generator).round() * 1e39


def non_finite(shape, generator):
    x = normal(shape, generator)
    for value in (math.inf, -math.inf, math.nan):
        x[torch.rand(shape, generator=generator) < 0.004] = value
    return x


NUMBERS = [
    normal,
    mixed_magnitudes,
    tiny,
    constant,
    zeros,
    ties,
    ties_of_bytes,
    extremes_of_both_signs,
    one_sided,
    largest,
    non_finite,
]


def two_values(shape, dtype, generator):
    """Two bit patterns of the dtype, whatever they mean; true and false for bool."""
    word = WORD[dtype.itemsize]
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(word).min, torch.iinfo(word).max)
    patterns = torch.randint(low, high + (dtype == torch.bool), (2,), generator=generator, dtype=word)
    return patterns[torch.randint(0, 2, shape, generator=generator)].view(dtype)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def tensor(name, numbers, shape, dtype, seed):
    if name == "bits":
        return two_values(shape, dtype, generator(seed))
    x = numbers(shape, generator(seed))
    most = math.inf if numbers is non_finite else torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype)


def outliers(shape, share, seed):
    """The first `share` of the channels in a random order."""
    width = shape[-1] if shape else 1
    return torch.randperm(width, generator=generator(seed))[: math.ceil(share * width)]


def bits(x):
    """The bit patterns of a tensor, flat; all NaN have the same."""
    x = x.contiguous().view(-1)
    return (x.masked_fill(x.isnan(), math.nan) if x.is_floating_point() else x).view(WORD[x.dtype.itemsize])


def assert_same_bits(got, expected, what):
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype), what
    differ = (bits(got) != bits(expected)).nonzero().view(-1)
    if differ.numel():
        at = int(differ[0])
        mine, theirs = got.reshape(-1)[at].item(), expected.reshape(-1)[at].item()
        pytest.fail(f"{what}: {differ.numel()} of {got.numel()} differ, first at {at}: got {mine}, not {theirs}")


def stored(codes, numel, width):
    """The codes as they are stored, and what fills the last byte."""
    each = codes if width.bits == 8 else torch.stack([codes & 15, codes >> 4], 1).view(-1)
    return each.split([numel, each.numel() - numel])


def assert_same_quantized(codec, payload, expected, shape):
    """Codes and parameters of finite groups are equal; those of the others say that these are not finite."""
    plain = codec
    if separates_outliers(codec.name):
        plain = make_codec("group" + codec.width.suffix, backend="reference", group_size=codec.group_size)
    quantized = 3 if codec.form == "asymmetric" else 2
    finite = plain.decompress(expected[:quantized], shape, torch.float32).isfinite().view(-1)
    (got, filling), (wanted, no_filling) = (stored(p[0], finite.numel(), codec.width) for p in (payload, expected))
    assert_same_bits(got[finite], wanted[finite], "codes")
    assert torch.equal(filling, no_filling)
    assert_same_bits(payload[1], expected[1], "scales")
    sound = expected[1].isfinite()
    for name, mine, theirs in zip(("offsets",), payload[2:quantized], expected[2:quantized], strict=False):
        assert_same_bits(mine[sound], theirs[sound], name)
    for name, mine, theirs in zip(("raw", "indices"), payload[quantized:], expected[quantized:], strict=False):
        assert_same_bits(mine, theirs, name)


class Trial:
    """One tensor through one codec, on the reference and in emulation."""

    def __init__(self, name, x, group_size=128, channels=None, scale="extreme", rounding="nearest"):
        self.x = x
        self.arguments = (name, group_size, channels, scale, rounding)
        self.reference = make(reference.CLASSES, *self.arguments)
        self.payload = self._compress(self.reference, x)
        self.result = self.reference.decompress(self.payload, x.shape, x.dtype)

    def run(self, offset, reversed):
        """Compress and decompress from addresses `offset` elements off, and compare."""
        with DeviceMemory() as memory:
            kernels = EmulatedKernels(SOURCES, reversed)
            codec = self._codec(memory, kernels)
            x = memory.place(self.x, offset)
            payload = self._compress(codec, x)
            assert [memory.uninitialised(t) for t in payload] == [0] * len(self.payload)
            result = self._decompress(memory, codec, payload, offset)
            of_reference = self._decompress(memory, codec, self.payload, offset)
        assert_same_bits(x, self.x, "the input, afterwards")
        self._check_payload(codec, payload)
        assert torch.equal(result.isfinite(), self.result.isfinite())
        assert_same_bits(result[result.isfinite()], self.result[result.isfinite()], "result")
        assert_same_bits(of_reference, self.result, "result of the reference's payload")
        assert (kernels.launches >= 3) == (x.numel() > 0)

    def _codec(self, memory, kernels):
        name, group_size, channels, scale, rounding = self.arguments
        if channels is not None:
            channels = memory.place(channels, name="channels")
        return make(cuda.CLASSES, name, group_size, channels, scale, rounding, kernels=kernels)

    def _check_payload(self, codec, payload):
        assert [(t.shape, t.dtype) for t in payload] == [(t.shape, t.dtype) for t in self.payload]
        assert sum(t.nbytes for t in payload) == codec.payload_bytes(self.x.shape, self.x.dtype)
        if codec.name == "bits":
            for what, got, wanted in zip(("bits", "values"), payload, self.payload, strict=True):
                assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8)), what
        else:
            assert_same_quantized(self.reference, payload, self.payload, self.x.shape)

    def _compress(self, codec, x):
        torch.default_generator.manual_seed(1234)
        return codec.compress(x)

    def _decompress(self, memory, codec, payload, offset):
        moved = tuple(memory.place(t, offset, f"payload[{i}]") for i, t in enumerate(payload))
        y = codec.decompress(moved, self.x.shape, self.x.dtype)
        assert memory.uninitialised(y) == 0
        assert y.is_contiguous()
        return y


@pytest.mark.parametrize(("name", "dtype"), NARROW_AND_DTYPES)
@given(
    suffix=st.sampled_from(["", "", "", "8"]),
    shape=shapes,
    numbers=st.sampled_from(NUMBERS),
    group_size=st.sampled_from(GROUP_SIZES),
    share=st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
    scale=st.sampled_from(SCALES),
    rounding=st.sampled_from(ROUNDINGS),
    offset=st.sampled_from([0, 0, 1, 3, 8]),
    reversed=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
@SETTINGS
def test_any_tensor(name, dtype, suffix, shape, numbers, group_size, share, scale, rounding, offset, reversed, seed):
    name += suffix if name + suffix in CODECS else ""
    x = tensor(name, numbers, tuple(shape), dtype, seed)
    channels = outliers(tuple(shape), share, seed) if separates_outliers(name) else None
    Trial(name, x, group_size, channels, scale, rounding).run(offset, reversed)


@pytest.mark.matrix
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize(("name", "dtype"), NARROW_AND_DTYPES)
def test_odd_shapes(name, dtype, group_size):
    odd_shapes(name, dtype, group_size)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", WIDE)
def test_odd_shapes_in_bytes(name, dtype):
    for group_size in (6, 128, 5000):
        odd_shapes(name, dtype, group_size)


def odd_shapes(name, dtype, group_size):
    for offset, size in enumerate([(), (1,), (7,), (127,), (129,), (13, 1), (1, 257), (2, 3, 5, 7), (67, 131)]):
        x = tensor(name, normal, size, dtype, offset)
        channels = outliers(size, 0.02, 0) if separates_outliers(name) else None
        Trial(name, x, group_size, channels).run(offset, reversed=False)


@pytest.mark.parametrize(("name", "dtype"), CODECS_AND_DTYPES)
def test_empty_tensors_launch_nothing(name, dtype):
    for size in [(0,), (0, 3), (3, 0), (2, 0, 4)]:
        channels = outliers(size, 0.5, 0) if separates_outliers(name) else None
        Trial(name, torch.empty(size, dtype=dtype), 8, channels).run(offset=0, reversed=False)


@pytest.mark.parametrize("reversed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES["bits"], ids=str)
def test_bits_of_several_tiles_with_values_of_their_own(dtype, reversed):
    for size in (3 * TILE - 5, TILE + 1, TILE):
        tiles = [two_values((TILE,), dtype, generator(seed)) for seed in range(3)]
        Trial("bits", torch.cat(tiles)[:size]).run(0, reversed)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", [name for name in CODECS if name.startswith(("group", "token", "asym", "outlier"))])
def test_blocks_restore_windows_that_begin_within_groups(name, dtype):
    """Each of 8192 or 16384 elements. The last one has a part of its units; or units have numbers of two groups."""
    for size, group_size in (((3, 5608), 1000), ((2, 8242), 30)):
        channels = outliers(size, 0.02, 0) if separates_outliers(name) else None
        Trial(name, tensor(name, normal, size, dtype, 0), group_size, channels).run(offset=0, reversed=False)


@pytest.mark.parametrize("name", CODECS)
def test_strided_tensors_are_refused_and_views_are_not(name):
    whole = tensor(name, normal, (6, 10, 12), torch.float32, 0)
    channels = torch.tensor([2]) if separates_outliers(name) else None
    codec = make(cuda.CLASSES, name, 8, channels, "extreme", "nearest", kernels=EmulatedKernels(SOURCES))
    for strided in (whole.transpose(0, 1), whole[:, 1:], whole[..., ::2]):
        with pytest.raises(ValueError, match="takes contiguous tensors"):
            codec.compress(strided)
    for view in (whole[1:5], whole.view(-1)[5:], whole[3, 1:]):
        Trial(name, view, 8, channels).run(offset=5, reversed=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("capacity", [0, 1, 3, 40])
def test_outliers_beyond_the_capacity_stay_in_their_groups(dtype, capacity):
    x = tensor("outlier", normal, (50, 40), dtype, 0)
    x[:, [3, 11, 29, 31, 38]] *= 30
    x[7, 11] = math.inf
    order, count, _ = rank_outliers(x, 1.0)
    assert int(count) == 5
    Trial("outlier", x, 32, order[:capacity]).run(offset=1, reversed=False)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@given(
    shape=shapes,
    numbers=st.sampled_from(NUMBERS),
    threshold=st.sampled_from([-1.0, 0.0, 0.5, 3.0]),
    offset=st.sampled_from([0, 1]),
    reversed=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
@SETTINGS
def test_outliers_are_ranked_alike(dtype, shape, numbers, threshold, offset, reversed, seed):
    x = tensor("outlier", numbers, tuple(shape), dtype, seed)
    order, count, is_finite = rank_outliers(x, threshold)
    with DeviceMemory() as memory:
        kernels = EmulatedKernels(SOURCES, reversed)
        placed = memory.place(x, offset)
        sums = cuda.channel_sums(placed, kernels=kernels)
        got = reference.rank_by_sums(sums, threshold)
    assert_same_bits(sums, reference.channel_sums(x), "sums")
    assert_same_bits(got[0], order, "order")
    assert_same_bits(got[1], count, "count")
    assert_same_bits(got[2], is_finite, "is_finite")
