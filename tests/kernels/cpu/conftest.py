from types import SimpleNamespace

import pytest
import torch

from ds_adacc.kernels import make_codec

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same(x, y):
    """Whether two tensors are the same to the bit; one NaN is as good as another."""
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return False
    x, y = x.reshape(-1), y.reshape(-1)
    numbers = ~(x.isnan() & y.isnan())
    return torch.equal(*(t.view(INTEGERS[t.itemsize])[numbers] for t in (x, y)))


def pair(name, group_size, channels=None, scale="extreme", rounding="nearest"):
    """(reference codec, compiled codec)."""
    options = {"group_size": group_size, "channels": channels, "scale": scale, "rounding": rounding}
    return tuple(make_codec(name, backend=backend, **options) for backend in ("reference", "cpu"))


def specified(codes, codec, rest, x):
    """The codes without those of groups that are not finite, which may be anything."""
    wide = codec.width.bits == 8
    ones = torch.full_like(codes, 0x81 if wide else 0x99)
    finite = codec.decompress((ones, *rest), x.shape, x.dtype).reshape(-1).isfinite()
    each = codes if wide else torch.stack([codes & 15, codes >> 4], 1).view(-1)
    return torch.cat([each[: len(finite)][finite], each[len(finite) :]])


def agree(x, reference, compiled):
    """Whether both codecs have the same payload of `x`, and results from it, though all memory is poisoned."""
    torch.manual_seed(11)
    expected = reference.compress(x)
    torch.manual_seed(11)
    payload = compiled.compress(x)
    if reference.name == "bits":
        codes = same(expected[0], payload[0])
    else:
        codes = torch.equal(*(specified(p[0], reference, p[1:], x) for p in (expected, payload)))
    y, z = (codec.decompress(payload, x.shape, x.dtype) for codec in (reference, compiled))
    return codes and all(map(same, expected[1:], payload[1:])) and same(y, z)


@pytest.fixture
def bits(monkeypatch):
    """Helpers that compare with the reference; what the compiled codecs allocate is poisoned."""
    empty = torch.empty

    def poisoned(*size, **options):
        x = empty(*size, **options)
        x.view(-1).view(torch.uint8).fill_(0xA5)
        return x

    monkeypatch.setattr(torch, "empty", poisoned)
    return SimpleNamespace(agree=agree, pair=pair, same=same)
