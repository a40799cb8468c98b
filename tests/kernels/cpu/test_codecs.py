"""The compiled codecs give the reference codecs' payloads and results, to the bit."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_adacc.kernels import CODECS, cpu, make_codec, rank_outliers, reference, separates_outliers
from ds_adacc.kernels.cpu import bits as bits_kernels
from ds_adacc.kernels.cpu import groups

pytestmark = pytest.mark.matrix
QUANTIZED = [name for name in CODECS if name != "bits"]
# The shapes of tests/kernels/conftest.py lie within one block: these cross blocks, strips of channels, and threads.
LARGE = [(4099,), (131, 1537), (129, 2048), (1, 9001), (66, 1026), (2311, 63)]
ALL = ["float32", "float16", "bfloat16", "float64", "bool"]


def separated(name, shape, capacity=2):
    """Channels for codecs that separate them: the last and the first; or all of them."""
    count = shape[-1] if shape else 1
    some = range(count) if capacity == "all" else sorted({count - 1, 0}, reverse=True)[: min(capacity, count)]
    return torch.tensor(list(some), dtype=torch.int64) if separates_outliers(name) else None


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("scale", ["extreme", "paper"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_quantized_is_the_reference(kit, bits, name, shape, dtype, scale, rounding):
    x = kit.sample(name, shape, dtype)
    for group_size in (2, 6, 128):
        assert bits.agree(x, *bits.pair(name, group_size, separated(name, shape), scale, rounding))


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("size", LARGE, ids=str)
def test_quantized_is_the_reference_beyond_a_block(kit, bits, name, size, dtype):
    x = kit.sample(name, size, dtype)
    for group_size in (64, 5000):
        assert bits.agree(x, *bits.pair(name, group_size, separated(name, size)))


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("size", [(131, 1537), (2311, 63)], ids=str)
def test_random_numbers_are_the_references_beyond_a_block(kit, bits, name, size):
    x = kit.sample(name, size, torch.float32)
    assert bits.agree(x, *bits.pair(name, 64, separated(name, size), rounding="stochastic"))


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("size", [(), (1,), (7,), (8,), (5, 13), (4096,), (4097,), (129, 1537), (12289,)], ids=str)
def test_bits_are_the_reference(kit, bits, size, kind):
    x = kit.sample("bits", size, getattr(torch, kind))
    assert bits.agree(x, *bits.pair("bits", 2))


@pytest.mark.parametrize("kind", ALL)
def test_values_that_the_first_block_lacks(bits, kind):
    for flags in (torch.arange(9001) > 9000, torch.arange(9001) < 9000, torch.zeros(9001, dtype=torch.bool)):
        x = flags.to(getattr(torch, kind))
        assert bits.agree(x, *bits.pair("bits", 2))
        assert bits.agree(-x if kind != "bool" else ~x, *bits.pair("bits", 2))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_whatever_the_default_device(kit, bits, name, rounding):
    """Tensors on another device have no address here."""
    x, channels = kit.sample(name, (66, 1026), torch.float32), separated(name, (66, 1026))
    with torch.device("meta"):
        assert bits.agree(x, *bits.pair(name, 64, channels, rounding=rounding))
        assert all(map(torch.equal, *(rank_outliers(x, 1.0, backend=backend) for backend in ("reference", "cpu"))))


@pytest.mark.parametrize("name", CODECS)
def test_empty(bits, name, empty_shape, dtype):
    channels = torch.empty(0, dtype=torch.int64) if separates_outliers(name) else None
    reference, compiled = bits.pair(name, 6, channels)
    compiled.workspace_bytes(empty_shape, dtype)  # must not divide by the number of elements
    assert bits.agree(torch.empty(empty_shape, dtype=dtype), reference, compiled)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("offset", [1, 2, 3, 5, 7])
def test_any_storage_offset(kit, bits, name, offset, dtype):
    x = kit.sample(name, (offset + 37 * 11,), dtype)[offset:].view(37, 11)
    assert x.storage_offset() == offset
    assert bits.agree(x, *bits.pair(name, 6, separated(name, x.shape)))


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("scale", ["extreme", "paper"])
def test_special_numbers(bits, name, dtype, scale):
    largest, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    specials = [torch.inf, -torch.inf, torch.nan, largest, -largest, tiny, -tiny, tiny / 8, -0.0, 0.0, 1.0]
    generator = torch.Generator().manual_seed(0)
    for one in specials:
        assert bits.agree(torch.full((9, 5), one, dtype=dtype), *bits.pair(name, 4, separated(name, (9, 5)), scale))
        for other in (torch.inf, torch.nan, -largest, tiny / 8, -0.0):
            x = torch.randn(24, 7, generator=generator) if one != 0 else torch.zeros(24, 7)
            x = (x * (tiny * 4 if abs(one) <= tiny else 1.0)).to(dtype)
            x[3, 4], x[3, 5], x[20, 0] = one, other, other
            assert bits.agree(x, *bits.pair(name, 6, separated(name, x.shape), scale))


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize(("half", "suffix"), [(8, ""), (128, "8")])
def test_halves_are_rounded_to_even(bits, name, half, suffix):
    """All codes, and all halves between them, in one group."""
    x = torch.cat([torch.tensor([-half, half - 0.5]), torch.arange(1 - 2 * half, 2 * half - 1) / 2]).repeat(4)
    x = x.view(-1, 4 * half)
    assert bits.agree(x, *bits.pair(name, 4 * half, separated(name, x.shape)))
    codes = make_codec("group" + suffix, backend="cpu", group_size=4 * half).compress(x)[0]
    found = codes.tolist() if suffix else [*(codes & 15).tolist(), *(codes >> 4).tolist()]
    assert set(found) == set(range(2 * half))


@pytest.mark.parametrize("capacity", [0, 1, "all"])
@pytest.mark.parametrize("size", [(), (1,), (9, 5), (70, 129), (257, 1)], ids=str)
def test_outlier_capacities(kit, bits, capacity, size, dtype):
    x = kit.sample("outlier", size, dtype)
    assert bits.agree(x, *bits.pair("outlier", 6, separated("outlier", size, capacity)))


FLOAT32 = st.floats(width=32)
NUMBERS = st.lists(FLOAT32 | st.floats(-1, 1, width=32), min_size=1, max_size=70)


@pytest.mark.parametrize("name", CODECS)
@given(
    numbers=NUMBERS,
    width=st.integers(1, 9),
    half_group=st.integers(1, 20),
    scale=st.sampled_from(["extreme", "paper"]),
    rounding=st.sampled_from(["nearest", "stochastic"]),
    kind=st.sampled_from(["float32", "float16", "bfloat16"]),
)
@settings(max_examples=75, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_numbers(bits, name, numbers, width, half_group, scale, rounding, kind):
    x = torch.tensor(numbers).to(getattr(torch, kind))
    x = x[: len(x) // width * width].view(-1, width)
    if name == "bits" and len(x):
        x = torch.where(x > 0, x[0, 0], x[-1, -1])
    assert bits.agree(x, *bits.pair(name, 2 * half_group, separated(name, x.shape), scale, rounding))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_every_half_is_read(bits, kind):
    """A group of twice the same number has an eighth of it as its scale."""
    halves = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(kind)
    assert bits.agree(halves.repeat_interleave(2), *bits.pair("group", 2))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_every_rounding_to_a_half_is_torchs(bits, kind):
    """The code 1 stands for the scale itself. All upper bits with the lower ones around a tie, and random numbers."""
    ties = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF, 0x7FFF, 0x8000, 0x8001], dtype=torch.int64)
    upper = torch.arange(0, 1 << 32, 1 << 13)[:, None] | ties
    random = torch.randint(0, 1 << 32, (1 << 20,), generator=torch.Generator().manual_seed(0))
    scales = torch.cat([upper.view(-1), random]).to(torch.int32).view(torch.float32)
    codes = torch.full((len(scales),), 0x99, dtype=torch.uint8)
    found = make_codec("group", backend="cpu", group_size=2).decompress((codes, scales), (len(scales), 2), kind)
    assert bits.same(found, scales.to(kind).repeat_interleave(2).view(-1, 2))


@pytest.mark.parametrize("name", CODECS)
def test_wrong_use_is_named(kit, name, dtype):
    x = kit.sample(name, (12, 5), dtype)
    codec = make_codec(name, backend="cpu", group_size=6, channels=separated(name, x.shape))
    payload = codec.compress(x)
    with pytest.raises(ValueError, match=rf"payload of shape \(12, 9\) for codec '{name}' is contiguous tensors of"):
        codec.decompress(payload, (12, 9), dtype)
    if separates_outliers(name) or name == "bits":
        other = torch.float16 if dtype == torch.float32 else torch.float32
        with pytest.raises(ValueError, match=rf"payload of shape \(12, 5\) for codec '{name}' .* bytes; got \["):
            codec.decompress(payload, (12, 5), other)
    with pytest.raises(ValueError, match="takes contiguous tensors"):
        codec.compress(x.t())
    with pytest.raises(ValueError, match=f"codec '{name}' of the backend 'cpu' takes tensors on the CPU; got .* meta"):
        codec.compress(x.to("meta"))
    with pytest.raises(TypeError, match=f"codec '{name}' does not take torch.int64"):
        codec.compress(x.long())


@pytest.mark.parametrize("channels", [[-1], [0, 5], [1 << 40]])
def test_channels_that_a_tensor_lacks_are_named(channels):
    codec = make_codec("outlier", backend="cpu", group_size=6, channels=torch.tensor(channels))
    with pytest.raises(IndexError, match=r"outlier channels must be in 0 ... 4; got \[.*" + str(channels[-1])):
        codec.compress(torch.ones(4, 5))
    good = make_codec("outlier", backend="cpu", group_size=6, channels=torch.tensor([0])).compress(torch.ones(4, 5))
    with pytest.raises(IndexError, match=r"outlier channels must be in 0 ... 4; got \[5\]"):
        codec.decompress((*good[:3], torch.tensor([5], dtype=torch.int32)), (4, 5), torch.float32)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("size", [(600, 1000), (999, 1001), (3, 100003), (70001, 1), (7, 1), (1,)], ids=str)
def test_workspace_stays_within_its_bound(kit, name, rounding, size, dtype):
    """Torch's share is counted as it is allocated, the buffers as they are cut."""
    x = kit.sample(name, size, dtype)
    channels = separated(name, size)
    codec = make_codec(name, backend="cpu", group_size=128, channels=channels, rounding=rounding)
    payload, peak, left = kit.allocated(lambda: codec.compress(x))
    workspace, leaked = peak - kit.nbytes(payload), left - kit.nbytes(payload)
    y, peak, left = kit.allocated(lambda: codec.decompress(payload, x.shape, dtype))
    assert kit.nbytes(payload) == codec.payload_bytes(x.shape, dtype)
    assert (leaked, left - kit.nbytes([y])) == (0, 0)
    numbers_and_codes, headers = 8 * min(x.numel(), groups.BLOCK // 2), 3 * 128  # of Numba's allocator and malloc
    buffers = bits_kernels.BLOCK if name == "bits" else numbers_and_codes + headers
    assert max(workspace, peak - kit.nbytes([y])) + buffers <= codec.workspace_bytes(x.shape, dtype)


def test_channels_may_be_changed_after_the_codec_was_made():
    channels, x = torch.tensor([1]), torch.tensor([[1.0, 60.0, 1.0, 1.0]])
    codec = make_codec("outlier", backend="cpu", group_size=4, channels=channels)
    channels[0] = 9
    assert torch.equal(codec.decompress(codec.compress(x), x.shape, x.dtype)[0, 1:2], x[0, 1:2])


@pytest.mark.parametrize("name", CODECS)
def test_workspace_does_not_grow_with_the_tensor(name):
    codec = make_codec(name, backend="cpu", group_size=128, channels=separated(name, (1, 1024)))
    small, large = ((rows, 1024) for rows in (1 << 10, 1 << 20))
    assert codec.workspace_bytes(small, torch.float32) == codec.workspace_bytes(large, torch.float32)


def test_ranking_is_the_reference(kit, shape, dtype):
    x = kit.sample("outlier", shape, dtype)
    for threshold in (-0.5, 0.0, 1.0, 3.0):
        expected, found = (rank_outliers(x, threshold, backend=backend) for backend in ("reference", "cpu"))
        assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("size", [*LARGE, (0, 4), (4, 0), (0,), (64, 3), (65, 3), (2, 64, 5)], ids=str)
def test_sums_are_the_reference(bits, size, dtype):
    x = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert bits.same(cpu.channel_sums(x), reference.channel_sums(x))
    if x.numel():
        x.view(-1)[-1], x.view(-1)[0] = torch.nan, -torch.inf
        assert bits.same(cpu.channel_sums(x), reference.channel_sums(x))


def test_what_cannot_be_ranked_is_named():
    with pytest.raises(TypeError, match=r"channels of torch.float64 cannot be ranked; valid: torch.float32, torch.fl"):
        rank_outliers(torch.ones(3, 4, dtype=torch.float64), 3.0, backend="cpu")
    with pytest.raises(ValueError, match=r"ranking takes contiguous tensors on the CPU; got strides \(1, 4\) on cpu"):
        rank_outliers(torch.ones(3, 4).t(), 3.0, backend="cpu")
