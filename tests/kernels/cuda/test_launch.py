"""How kernels are chosen and launched; none of it needs a device."""

import pytest
import torch

from ds_adacc.kernels import CODECS, cuda, separates_outliers
from ds_adacc.kernels.codec import make
from ds_adacc.kernels.cuda.launch import Launching
from ds_adacc.kernels.reference.bits import TILE

QUANTIZED = [name for name in CODECS if name != "bits"]


class Recorder:
    """Kernels that note what is looked up and launched."""

    def __init__(self):
        self.looked_up, self.launched = [], []

    def get(self, source, name):
        self.looked_up.append((source, name))
        return lambda blocks, threads, args: self.launched.append((name, blocks, threads, args))


def build(name, recorder, channels=(3, 1), group_size=128, scale="extreme", rounding="nearest"):
    channels = torch.tensor(channels, dtype=torch.int64) if separates_outliers(name) else None
    return make(cuda.CLASSES, name, group_size, channels, scale, rounding, kernels=recorder)


def pointers(tensors):
    return tuple(t.data_ptr() for t in tensors)


@pytest.mark.parametrize("name", ["outlier", "outlier8"])
def test_arguments_are_pointers_then_numbers(name):
    recorder = Recorder()
    codec = build(name, recorder, scale="paper")
    x = torch.randn(64, 256).bfloat16()
    payload = codec.compress(x)
    y = codec.decompress(payload, x.shape, x.dtype)
    (mask,) = codec._masks.values()
    inputs = (x.data_ptr(), *pointers(payload), codec.channels.data_ptr(), mask.data_ptr())
    outliers = (256, 2, 2, (1 << 56) - 1)  # channels, capacity, lanes, reciprocal
    groups = (64 * 256, 128, (1 << 57) - 1)  # elements, of a group, reciprocal
    assert recorder.launched == [
        (f"{name}_compress_bf16", 1, 256, (*inputs, 64 * 256, 128, 2, 1, *outliers)),
        (f"{name}_decompress_bf16", 1, 256, (*pointers(payload), y.data_ptr(), *groups, *outliers)),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_mask_of_outlier_channels_is_made_once(dtype):
    codec = build("outlier", Recorder(), channels=(5, 0))
    for rows in (4, 4, 9):
        codec.compress(torch.zeros(rows, 8, dtype=dtype))
    (mask,) = codec._masks.values()
    assert (mask.tolist(), mask.itemsize) == ([0, -1, -1, -1, -1, 0, -1, -1], dtype.itemsize)


@pytest.mark.parametrize("name", ["outlier", "outlier8"])
def test_without_outlier_channels_the_kernels_are_those_of_groups(name):
    recorder = Recorder()
    codec = build(name, recorder, channels=())
    x = torch.zeros(6, 8)
    codec.decompress(codec.compress(x), x.shape, x.dtype)
    group = name.replace("outlier", "group")
    assert [launch[0] for launch in recorder.launched] == [f"{group}_compress_f32", f"{group}_decompress_f32"]
    assert codec._masks == {}


def test_groups_beyond_32_bit_places_are_refused():
    with pytest.raises(ValueError, match=r"groups have at most 268435456 elements on CUDA; got 536870912 for shape"):
        build("token", Recorder()).compress(torch.empty(2, 1 << 29, device="meta", dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("name", "size", "kernels"),
    [
        ("token", (5, 7), ["blocks_fit_f32", "blocks_encode_f32"]),
        ("token", (5, 6), ["group_compress_f32"]),
        ("token", (1, 7), ["group_compress_f32"]),
        ("channel", (5, 8), ["channel_compress_f32"]),
        ("channel", (5, 6), ["blocks_fit_f32", "blocks_encode_f32"]),
        ("asymmetric", (5, 7), ["asymmetric_compress_f32"]),
        ("token8", (5, 7), ["blocks8_fit_f32", "blocks8_encode_f32"]),
        ("token8", (5, 6), ["group8_compress_f32"]),
        ("channel8", (5, 8), ["channel8_compress_f32"]),
        ("asymmetric8", (5, 7), ["asymmetric8_compress_f32"]),
    ],
)
def test_kernels_are_chosen_by_the_shape(name, size, kernels):
    recorder = Recorder()
    build(name, recorder).compress(torch.randn(size))
    assert [launch[0] for launch in recorder.launched] == kernels


def test_bits_are_compressed_in_one_launch():
    recorder = Recorder()
    build("bits", recorder).compress(torch.zeros(TILE + 1, dtype=torch.bool))
    assert [launch[:3] for launch in recorder.launched] == [("bits_compress_1", 2, 256)]


def test_unaligned_channels_take_the_kernels_for_any_address():
    recorder = Recorder()
    build("channel", recorder).compress(torch.randn(41)[1:].view(5, 8))
    assert [launch[0] for launch in recorder.launched] == ["blocks_fit_f32", "blocks_encode_f32"]


@pytest.mark.parametrize("name", CODECS)
def test_kernels_are_looked_up_once_a_shape(name):
    recorder = Recorder()
    codec = build(name, recorder)
    x = torch.zeros(6, 8)
    payload = codec.compress(x)
    codec.decompress(payload, x.shape, x.dtype)
    found = len(recorder.looked_up)
    for _ in range(3):
        codec.decompress(codec.compress(x), list(x.shape), x.dtype)
    assert len(recorder.looked_up) == found


def test_launches_do_not_pile_up():
    codec = build("group", Recorder())
    for n in range(Launching.LIMIT + 50):
        codec.compress(torch.zeros(n))
    assert len(codec._known) == 50


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_seed_is_drawn_for_stochastic_rounding_alone(name):
    recorder = Recorder()
    x = torch.randn(6, 8)
    torch.manual_seed(3)
    seed = int(torch.empty((), dtype=torch.int64).random_())
    torch.manual_seed(3)
    payload = build(name, recorder, rounding="stochastic").compress(x)
    kernel, _, _, args = recorder.launched[-1]
    assert "_stochastic_" in kernel
    assert args[1 + len(payload) + 2 * separates_outliers(name)] == seed
    before = torch.get_rng_state()
    build(name, recorder).compress(x)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", CODECS)
def test_payloads_are_allocated_on_the_tensors_device_and_nothing_else_is(name):
    codec = build(name, Recorder())
    if separates_outliers(name):
        codec.channels = codec.channels.to("meta")
    x = torch.empty(64, 8, device="meta")
    assert codec.workspace_bytes(x.shape, x.dtype) == 0
    payload = codec.compress(x)
    assert {t.device.type for t in payload} == {"meta"}
    assert sum(t.nbytes for t in payload) == codec.payload_bytes(x.shape, x.dtype)


def test_tensors_elsewhere_are_refused(monkeypatch):
    monkeypatch.setattr(cuda, "missing", lambda: None)
    codec = build("group", None)
    with pytest.raises(ValueError, match="takes tensors on a CUDA device; got one on cpu"):
        codec.compress(torch.zeros(4))


# ---- what is missing ----
