from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ds_adacc.kernels import make_codec, separates_outliers

SHAPES = [(), (1,), (2,), (7,), (127, 1), (1, 129), (64, 4), (5, 13), (3, 7, 11), (2, 3, 5, 7), (257, 131)]
EMPTY = [(0,), (0, 3), (3, 0), (2, 0, 4)]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=SHAPES, ids=str)
def shape(request):
    return request.param


@pytest.fixture(params=EMPTY, ids=str)
def empty_shape(request):
    return request.param


@pytest.fixture(params=FLOATS, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request):
    return request.param


def build(name, shape, group_size=6, device="cpu"):
    """A codec for tensors of `shape`; one that separates outliers keeps the last and the first channel."""
    channels = None
    if separates_outliers(name):
        count = shape[-1] if shape else 1
        channels = torch.tensor(sorted({count - 1, 0}, reverse=True)[:count], dtype=torch.int64, device=device)
    return make_codec(name, backend="reference", group_size=group_size, channels=channels)


def sample(name, shape, dtype, seed=0):
    """A tensor that the codec may hold: dropout noise for "bits", heavy-tailed numbers for the rest."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (x > 0.3).to(dtype) / 0.75 if name == "bits" else (x * x.abs()).to(dtype)


def stored(codes, width):
    """The bytes of a list of codes."""
    numbers = [code + width.half for code in codes]
    if width.bits == 8:
        return numbers
    return [low | high << 4 for low, high in zip(numbers[::2], [*numbers, 0][1::2], strict=True)]


def restore(codec, x):
    return codec.decompress(codec.compress(x), x.shape, x.dtype)


def relative_error(x, y):
    return float((x.double() - y.double()).norm() / x.double().norm())


def nbytes(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def allocated(function):
    """Return (result, most bytes alive at once, bytes alive at the end) as the allocator saw them."""
    function()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return result, peak, live


@pytest.fixture
def kit():
    """Helpers shared by the codecs' tests."""
    return SimpleNamespace(
        build=build,
        sample=sample,
        stored=stored,
        restore=restore,
        relative_error=relative_error,
        nbytes=nbytes,
        allocated=allocated,
    )
