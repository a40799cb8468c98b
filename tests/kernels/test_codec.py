"""What holds for every codec."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_adacc.kernels import CODECS, make_codec, separates_outliers
from ds_adacc.kernels.reference import bits, scores, tiles

QUANTIZED = [name for name in CODECS if name != "bits"]


@pytest.fixture(params=CODECS)
def name(request):
    return request.param


@pytest.mark.matrix
def test_round_trip_is_close_fresh_and_of_the_announced_size(kit, name, shape, dtype):
    x = kit.sample(name, shape, dtype)
    before = x.clone()
    codec = kit.build(name, shape)
    payload = codec.compress(x)
    y = codec.decompress(payload, x.shape, dtype)
    assert torch.equal(x, before)
    assert (y.shape, y.dtype, y.is_contiguous()) == (x.shape, dtype, True)
    assert kit.nbytes(payload) == codec.payload_bytes(x.shape, dtype)
    allowed = 0 if codec.lossless else 1 / 8 if codec.width.bits == 4 else 1 / 100
    assert (x.float() - y.float()).abs().max() <= allowed * x.float().abs().max()


def test_nothing_is_aliased(kit, name):
    x = kit.sample(name, (12, 10), torch.float32)
    codec = kit.build(name, x.shape)
    first, second = codec.compress(x), codec.compress(x)
    y, z = codec.decompress(first, x.shape, x.dtype), codec.decompress(first, x.shape, x.dtype)
    tensors = [x, *first, *second, y, z, *([codec.channels] if separates_outliers(name) else [])]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)


def test_payload_is_not_consumed(kit, name):
    x = kit.sample(name, (12, 10), torch.float32)
    codec = kit.build(name, x.shape)
    payload = codec.compress(x)
    before = [t.clone() for t in payload]
    codec.decompress(payload, x.shape, x.dtype)
    assert all(map(torch.equal, payload, before))


def test_empty(kit, name, empty_shape, dtype):
    x = torch.empty(empty_shape, dtype=dtype)
    codec = _without_outliers(name) if separates_outliers(name) else kit.build(name, (1,))
    payload = codec.compress(x)
    assert kit.nbytes(payload) == codec.payload_bytes(x.shape, dtype)
    codec.workspace_bytes(x.shape, dtype)  # must not divide by the number of elements
    assert codec.decompress(payload, x.shape, dtype).shape == x.shape


def _without_outliers(name):
    return make_codec(name, backend="reference", group_size=6, channels=torch.empty(0, dtype=torch.int64))


@pytest.mark.matrix
@pytest.mark.parametrize("size", [(600, 1000), (999, 1001), (3, 100003), (70001, 1), (7, 1), (1,)], ids=str)
def test_workspace_stays_within_its_bound(kit, name, size, dtype):
    x = kit.sample(name, size, dtype)
    codec = kit.build(name, size, group_size=128)
    payload, peak, left = kit.allocated(lambda: codec.compress(x))
    workspace, leaked = peak - kit.nbytes(payload), left - kit.nbytes(payload)
    y, peak, left = kit.allocated(lambda: codec.decompress(payload, x.shape, dtype))
    workspace = max(workspace, peak - kit.nbytes([y]))
    bound = codec.workspace_bytes(x.shape, dtype)
    assert (leaked, left - kit.nbytes([y])) == (0, 0)
    assert workspace <= bound <= 2 * workspace + 64


def test_workspace_does_not_grow_with_the_tensor(kit, name):
    codec = kit.build(name, (1, 1024), group_size=128)
    small, large = ((rows, 1024) for rows in (1 << 10, 1 << 20))
    assert codec.workspace_bytes(small, torch.float32) == codec.workspace_bytes(large, torch.float32)


@pytest.mark.matrix
def test_bits_do_not_depend_on_the_chunks(kit, name, shape, dtype, monkeypatch):
    x = kit.sample(name, shape, dtype)
    codec = kit.build(name, shape)
    whole = codec.compress(x)
    restored = codec.decompress(whole, x.shape, dtype)
    for parts in (2, 9):
        for module in (tiles, bits, scores):
            monkeypatch.setattr(module, "CHUNK", max(8, x.numel() // parts // 8 * 8))
        payload = codec.compress(x)
        assert all(map(torch.equal, whole, payload))
        assert torch.equal(codec.decompress(payload, x.shape, dtype), restored)


def test_the_host_never_waits(kit, name):
    """A fake tensor has no data, so asking for some raises."""
    with FakeTensorMode():
        codec = kit.build(name, (60, 10))
        x = torch.empty(60, 10, dtype=torch.float16)
        payload = codec.compress(x)
        assert codec.decompress(payload, x.shape, x.dtype).shape == x.shape


def test_autograd_is_left_out(kit, name):
    x = kit.sample(name, (6, 10), torch.float32).requires_grad_()
    codec = kit.build(name, x.shape)
    payload = codec.compress(x)
    y = codec.decompress(payload, x.shape, x.dtype)
    assert not any(t.requires_grad for t in (*payload, y))


def test_wrong_dtype_is_named(kit, name):
    codec = kit.build(name, (4,))
    valid = ", ".join(map(str, codec.dtypes))
    message = f"^codec '{name}' does not take torch.int64; it takes {valid}$"
    calls = (
        lambda: codec.compress(torch.arange(4)),
        lambda: codec.decompress((), (4,), torch.int64),
        lambda: codec.payload_bytes((4,), torch.int64),
        lambda: codec.workspace_bytes((4,), torch.int64),
    )
    for call in calls:
        with pytest.raises(TypeError, match=message):
            call()


def test_strided_input_is_refused(kit, name):
    with pytest.raises(ValueError, match="takes contiguous tensors"):
        kit.build(name, (4, 3)).compress(torch.zeros(3, 4).t())


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_non_finite_numbers_come_back_non_finite(kit, name, value, dtype):
    x = kit.sample(name, (20, 9), dtype)
    x[3, 4] = x[7, 0] = value
    codec = kit.build(name, x.shape)
    bad = ~kit.restore(codec, x).isfinite()
    assert bad[3, 4]
    assert bad[7, 0]
    assert bad.sum() <= (18 if codec.form == "token" else 12)


@pytest.mark.parametrize("name", QUANTIZED)
def test_largest_numbers_do_not_overflow(kit, name, dtype):
    largest = torch.finfo(dtype).max
    for pattern in ([1.0, -1.0], [1.0, 0.0], [-1.0, 0.0], [-1.0, 1.0, 0.5, -0.3, 0.99], [1.0, 1.0]):
        x = (torch.tensor(pattern).repeat(12).view(-1, 4)[:15].double() * largest).to(dtype)
        y = kit.restore(kit.build(name, x.shape), x)
        assert y.isfinite().all()
        assert ((x.double() - y.double()).abs() <= largest / 7.9).all()


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("value", [1e-45, 1e-40, 2.0**-126, 1.1e-37])
def test_subnormal_numbers_give_numbers(kit, name, value):
    x = torch.tensor([value, -value, 0, value / 2] * 15).view(-1, 4)
    codec = kit.build(name, x.shape)
    y = kit.restore(codec, x)
    assert y.isfinite().all()
    assert (x - y).abs().max() <= (2 * codec.width.half - 1) * 2.0**-126


@pytest.mark.matrix
@pytest.mark.parametrize("name", QUANTIZED)
def test_constants_come_back_exactly(kit, name, shape, dtype):
    for value in (0.0, 1.0, -3.140625, 1e4, -6e-8):
        x = torch.full(shape, value, dtype=dtype)
        assert torch.equal(kit.restore(kit.build(name, shape), x), x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", [(1,), (3, 7, 11), (700, 999)], ids=str)
def test_cuda_gives_the_same_bits_and_never_waits(kit, name, size, dtype):
    x = kit.sample(name, size, dtype)
    here, there = kit.build(name, size), kit.build(name, size, device="cuda")
    payload = here.compress(x)
    y = here.decompress(payload, x.shape, dtype)
    x = x.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        cuda_payload = there.compress(x)
        cuda_y = there.decompress(cuda_payload, x.shape, dtype)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b.cpu()) for a, b in zip(payload, cuda_payload, strict=True))
    assert torch.equal(y, cuda_y.cpu())
