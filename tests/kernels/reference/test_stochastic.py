"""Stochastic rounding: the generator, the codes it gives, and what they are worth."""

import numpy as np
import pytest
import torch

from ds_adacc.kernels import CODECS, make_codec, separates_outliers
from ds_adacc.kernels.codec import draw_seed
from ds_adacc.kernels.reference import tiles
from ds_adacc.kernels.reference.philox import philox, uniform

QUANTIZED = [name for name in CODECS if name != "bits"]
SEEDS = [0, 1, (1 << 63) - 1, 0x123456789ABCDEF]


def oracle(counter, key):
    """Philox4x32-10 of one counter, as its paper has it."""
    a, b, c, d = counter
    low, high = key
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = second >> 32 ^ b ^ low, second & 0xFFFFFFFF, first >> 32 ^ d ^ high, first & 0xFFFFFFFF
        low, high = low + 0x9E3779B9 & 0xFFFFFFFF, high + 0xBB67AE85 & 0xFFFFFFFF
    return [a, b, c, d]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_the_oracle_knows_the_published_answers(counter, key, words):
    numbers = ([int(word, 16) for word in text.split()] for text in (counter, key, words))
    counter, key, words = numbers
    assert oracle(counter, key) == words


@pytest.mark.parametrize("seed", SEEDS)
def test_philox_is_the_oracles(seed):
    calls = [0, 1, 2, (1 << 32) - 1, 1 << 32, (1 << 40) + 12345]
    expected = [oracle([call & 0xFFFFFFFF, call >> 32, 0, 0], [seed & 0xFFFFFFFF, seed >> 32]) for call in calls]
    assert philox(torch.tensor(calls), seed).tolist() == expected


@pytest.mark.parametrize(("start", "stop"), [(0, 9), (2, 3), (6, 21), (4, 8), ((1 << 34) + 2, (1 << 34) + 9)])
def test_a_number_depends_on_its_index_and_the_seed(start, stop):
    words = [oracle([i // 4 & 0xFFFFFFFF, i // 4 >> 32, 0, 0], [77, 0])[i % 4] for i in range(start, stop)]
    numbers = uniform(start, stop, 77, torch.device("cpu"))
    assert numbers.dtype == torch.float32
    assert numbers.tolist() == [(word >> 8) / 2**24 for word in words]


def build(name, width=10, **options):
    channels = torch.tensor([width - 1, 0]) if separates_outliers(name) else None
    return make_codec(name, backend="reference", group_size=6, channels=channels, rounding="stochastic", **options)


def values_before_rounding(codec, x):
    """The float32 values that a codec rounds, in memory order."""
    found = []
    for tile in tiles.tiles(codec.blocks(x.shape)):
        found.append(codec.quantize(codec.load(x, tile))[0].reshape(-1))
    return torch.cat(found).numpy()


@pytest.mark.parametrize("scale", ["extreme", "paper"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_codes_are_the_formula(kit, name, dtype, scale, monkeypatch):
    x = kit.sample(name, (23, 10), dtype)
    codec = build(name, scale=scale)
    torch.manual_seed(5)
    seed = draw_seed()
    values = values_before_rounding(codec, x)
    floor = np.floor(values)
    up = uniform(0, x.numel(), seed, x.device).numpy() < values - floor
    half = codec.width.half
    expected = kit.stored(np.clip(floor + up, -half, half - 1).astype(int).tolist(), codec.width)
    for chunk in (tiles.CHUNK, 20):
        monkeypatch.setattr(tiles, "CHUNK", chunk)
        torch.manual_seed(5)
        assert codec.compress(x)[0].tolist() == expected


@pytest.mark.parametrize("name", QUANTIZED)
def test_calls_differ_and_torchs_seed_repeats_them(kit, name):
    x = kit.sample(name, (40, 10), torch.float32)
    codec = build(name)
    torch.manual_seed(1)
    first, second = codec.compress(x)[0], codec.compress(x)[0]
    torch.manual_seed(1)
    again = codec.compress(x)[0]
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_nearest_rounding_draws_nothing(kit):
    x = kit.sample("group", (40, 10), torch.float32)
    before = torch.get_rng_state()
    make_codec("group", backend="reference", group_size=6).compress(x)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_mean_over_calls_is_the_number():
    """Where nothing is clipped: the asymmetric codec's range holds all numbers."""
    x = torch.linspace(0, 1, 16)
    codec = make_codec("asymmetric", backend="reference", group_size=16, rounding="stochastic")
    torch.manual_seed(0)
    total = torch.zeros(16, dtype=torch.float64)
    for _ in range(2000):
        total += codec.decompress(codec.compress(x), x.shape, x.dtype).double()
    step = 1 / 15
    assert ((total / 2000 - x).abs() < 5 * step / 2 / 2000**0.5).all()


@pytest.mark.parametrize("size", [(600, 1000), (7,), (1,)], ids=str)
def test_workspace_stays_within_its_bound(kit, size, dtype):
    x = kit.sample("group", size, dtype)
    codec = build("group")
    payload, peak, _ = kit.allocated(lambda: codec.compress(x))
    workspace = peak - kit.nbytes(payload)
    assert workspace <= codec.workspace_bytes(x.shape, dtype) <= 2 * workspace + 64
