"""The CUDA codecs on a device: the reference's bits, on any stream, from any thread, in a graph."""

import threading

import pytest
import torch

from ds_adacc.kernels import CODECS, ROUNDINGS, SCALES, cuda, make_codec, rank_outliers, reference, separates_outliers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
QUANTIZED = [name for name in CODECS if name != "bits"]
SIZES = [(), (7,), (129, 1), (1, 127), (3, 7, 11), (64, 128), (129, 96), (700, 999), (1030, 4096), (3, 20000)]


def build(name, width, backend="cuda", group_size=128, **options):
    channels = None
    if separates_outliers(name):
        channels = torch.tensor(sorted({width - 1, 0, width // 2}), device="cuda" if backend == "cuda" else "cpu")
    return make_codec(name, backend=backend, group_size=group_size, channels=channels, **options)


def sample(name, size, dtype, seed=0):
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return (x > 0.3).to(dtype) / 0.75 if name == "bits" else (x * x.abs()).to(dtype)


def words(x):
    return x.cpu().contiguous().view(-1).view(torch.uint8)


def assert_same_bits(got, expected):
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        assert torch.equal(words(mine), words(theirs))


def poison(*tensors):
    """Leave what the next allocations will find full of ones."""
    for numel in {t.nbytes for t in tensors}:
        torch.full((numel,), 255, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_payloads_and_results_are_the_references(name, size, dtype, scale, rounding):
    x = sample(name, size, dtype)
    width = size[-1] if size else 1
    here, there = (build(name, width, b, scale=scale, rounding=rounding) for b in ("reference", "cuda"))
    torch.manual_seed(1)
    payload = here.compress(x)
    y = here.decompress(payload, size, dtype)
    poison(x, *payload)
    torch.manual_seed(1)
    got = there.compress(x.cuda())
    assert_same_bits(got, payload)
    poison(y)
    assert_same_bits([there.decompress(got, size, dtype)], [y])


@pytest.mark.parametrize("offset", [1, 3, 4])
@pytest.mark.parametrize("name", CODECS)
def test_views_at_any_element(name, dtype, offset):
    whole = sample(name, (64 * 96 + offset,), dtype)
    x, y = whole[offset:].view(64, 96), whole.cuda()[offset:].view(64, 96)
    assert_same_bits(build(name, 96).compress(y), build(name, 96, "reference").compress(x))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("name", QUANTIZED)
def test_non_finite_numbers_spoil_their_groups_alone(name, dtype, value):
    x = sample(name, (256, 96), dtype)
    x[100, 40] = value
    expected = build(name, 96, "reference")
    expected = expected.decompress(expected.compress(x), x.shape, dtype)
    codec = build(name, 96)
    y = codec.decompress(codec.compress(x.cuda()), x.shape, dtype).cpu()
    assert torch.equal(y.isfinite(), expected.isfinite())
    assert torch.equal(y[y.isfinite()], expected[y.isfinite()])


@pytest.mark.parametrize("size", [(1, 5), (200, 33), (1000, 1024), (0, 4)], ids=str)
def test_outliers_are_ranked_alike(size, dtype):
    x = sample("outlier", size, dtype)
    here, there = rank_outliers(x, 1.0), rank_outliers(x.cuda(), 1.0, backend="cuda")
    assert_same_bits(there, here)
    assert_same_bits([cuda.channel_sums(x.cuda())], [reference.channel_sums(x)])


@pytest.mark.parametrize("name", CODECS)
def test_the_host_never_waits_and_only_the_payload_is_allocated(name, dtype):
    x = sample(name, (1000, 1024), dtype).cuda()
    codec = build(name, 1024)
    codec.decompress(codec.compress(x), x.shape, dtype)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # a fragment of the cache may be given whole for less
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        payload = codec.compress(x)
        y = codec.decompress(payload, x.shape, dtype)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    rounded = [t.untyped_storage().nbytes() for t in (*payload, y)]
    assert torch.cuda.memory_allocated() - before == sum(-(-n // 512) * 512 for n in rounded)


@pytest.mark.parametrize("name", CODECS)
def test_two_streams_do_not_disturb_each_other(name):
    codec = build(name, 1024)
    xs = [sample(name, (2048, 1024), torch.bfloat16, seed).cuda() for seed in (0, 1)]
    expected = [codec.decompress(codec.compress(x), x.shape, x.dtype) for x in xs]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(5):
        for stream, x, found in zip(streams, xs, results, strict=True):
            with torch.cuda.stream(stream):
                # The tensor is made on this stream: a launch on another would read it too early.
                found.append(codec.decompress(codec.compress(x + 0), x.shape, x.dtype))
    torch.cuda.synchronize()
    for found, wanted in zip(results, expected, strict=True):
        assert_same_bits(found, [wanted] * 5)


@pytest.mark.parametrize("name", CODECS)
def test_a_new_thread_can_launch(name):
    x = sample(name, (100, 96), torch.float16).cuda()
    codec, found = build(name, 96), []
    expected = codec.decompress(codec.compress(x), x.shape, x.dtype)

    def work():
        found.append(codec.decompress(codec.compress(x), x.shape, x.dtype))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert_same_bits(found, [expected])


def test_hooks_run_in_autograds_thread():
    codec, threads = build("group", 1024), set()

    def unpack(packed):
        threads.add(threading.get_ident())
        return codec.decompress(*packed)

    x = sample("group", (512, 1024), torch.float32).cuda().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (codec.compress(t), t.shape, t.dtype), unpack):
        y = (x * x).sum()
    y.backward()
    restored = codec.decompress(codec.compress(x.detach()), x.shape, x.dtype)
    assert threads != {threading.get_ident()}
    assert_same_bits([x.grad], [restored + restored])


@pytest.mark.parametrize("name", CODECS)
def test_a_graph_captures_and_replays(name, dtype):
    cuda.warm_up(torch.device("cuda", 0))
    x, codec = sample(name, (256, 128), dtype).cuda(), build(name, 128)
    codec.decompress(codec.compress(x), x.shape, dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        payload = codec.compress(x)
        y = codec.decompress(payload, x.shape, dtype)
    x.copy_(sample(name, (256, 128), dtype, seed=1))
    graph.replay()
    torch.cuda.synchronize()
    expected = build(name, 128, "reference").compress(x.cpu())
    assert_same_bits(payload, expected)
    assert_same_bits([y], [build(name, 128, "reference").decompress(expected, x.shape, dtype)])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", CODECS)
def test_tensors_on_another_device_than_the_current_one(name):
    x = sample(name, (100, 96), torch.float32)
    channels = torch.tensor([0, 95], device="cuda:1") if separates_outliers(name) else None
    there = make_codec(name, backend="cuda", group_size=128, channels=channels)
    here = make_codec(name, backend="reference", group_size=128, channels=None if channels is None else channels.cpu())
    payload = there.compress(x.to("cuda:1"))
    assert torch.cuda.current_device() == 0
    assert_same_bits(payload, here.compress(x))
    assert_same_bits(
        [there.decompress(payload, x.shape, x.dtype)],
        [x if name == "bits" else here.decompress(here.compress(x), x.shape, x.dtype)],
    )
