"""The codecs' backend follows the device, and is told once where a faster one is missing; who may be offloaded."""

from dataclasses import replace

import pytest
import torch
import zoo
from recorded import record

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.kernels import SCALES, cpu, cuda, reference
from ds_adacc.profile import codec_maker as module
from ds_adacc.profile.codec_maker import CodecMaker
from ds_adacc.program.arguments import ValueRef
from ds_adacc.program.geometry import Geometry
from ds_adacc.program.recording import Position, RecordedValue, Recording

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def maker(**section):
    return CodecMaker(load({"adacc": {"codecs": "paper", **section}}))


def saved(**changes):
    """A saved value of 1 MiB on a CUDA device, and its recording."""
    geometry = Geometry((512, 512), (512, 1), torch.float32, 0)
    value = RecordedValue(0, "gelu0", "made", geometry, channels=512, role="gelu", device="cuda")
    value = replace(value, **changes)
    return value, Recording("block", (value,), (), (Position(ValueRef(0, value.geometry), 0),), (), ())


def test_auto_is_the_compiled_backend_on_the_cpu():
    assert isinstance(maker().make("group", CPU, None), cpu.GroupCodec)


def test_a_named_backend_is_taken():
    assert type(maker(backend="reference").make("group", CPU, None)) is reference.GroupCodec


def test_scale_and_rounding_are_those_of_the_section():
    x = torch.tensor([[1.0, 2.0, 4.0, 8.1]])
    payloads = [maker(scale=scale, backend="reference").make("group", CPU, None).compress(x) for scale in SCALES]
    assert not torch.equal(payloads[0][1], payloads[1][1])
    x = torch.rand(64, 128)
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        codec = maker(rounding="stochastic").make("group", CPU, None)
        before = torch.get_rng_state()
        drawn.append(codec.compress(x)[0])
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_a_cuda_device_without_cupy_is_told_of_once(caplog, monkeypatch):
    monkeypatch.setattr(cuda, "missing", lambda: "CUDA codecs need CuPy: pip install 'ds-adacc[cuda13]'")
    codecs = maker()
    with caplog.at_level("WARNING", logger="ds_adacc"):
        made = [codecs.make("group", CUDA, None) for _ in range(3)]
    assert all(type(codec) is reference.GroupCodec for codec in made)
    (warning,) = caplog.messages
    assert "cuda:0" in warning and "pip install 'ds-adacc[cuda13]'" in warning


@pytest.mark.parametrize("has_accelerator", [False, True])
def test_slow_codecs_on_the_host_are_told_of_only_where_blocks_run_there(has_accelerator, caplog, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_accelerator)
    monkeypatch.setattr(module, "choose_backend", lambda device: ("cpu", "torch has no OpenMP"))
    with caplog.at_level("WARNING", logger="ds_adacc"):
        maker().make("group", CPU, None)
    assert len(caplog.records) == (not has_accelerator)


def test_a_cuda_device_with_cupy_is_warmed_up_once(monkeypatch):
    warmed = []
    monkeypatch.setattr(cuda, "missing", lambda: None)
    monkeypatch.setattr(cuda, "warm_up", warmed.append)
    monkeypatch.setattr(module, "make_codec", lambda name, **options: options["backend"])
    codecs = maker()
    assert [codecs.make("group", CUDA, None) for _ in range(3)] == ["cuda"] * 3
    assert warmed == [CUDA]


def test_a_saved_value_on_a_cuda_device_may_be_offloaded():
    assert maker().on_offer(*saved()) == ("outlier", planner.OFFLOAD)
    assert maker(codecs="none").on_offer(*saved()) == (planner.OFFLOAD,)
    assert maker(codecs="none").on_offer(*saved(moderate=False)) == (planner.OFFLOAD,)
    assert maker(codecs="none").on_offer(*saved(role="statistic")) == (planner.OFFLOAD,)


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "cpu"},
        {"geometry": Geometry((512, 511), (511, 1), torch.float32, 0)},
        {"geometry": Geometry((512, 512), (513, 1), torch.float32, 0)},
        {"dynamic": True},
        {"overwritten": True},
        {"origin": "buffer"},
    ],
    ids=["on the CPU", "small", "with gaps", "dynamic", "overwritten", "the caller's"],
)
def test_others_may_not(changes):
    assert maker(codecs="none").on_offer(*saved(**changes)) == ()


def test_nothing_is_offloaded_where_the_section_says_so():
    assert maker(offload=False).on_offer(*saved()) == ("outlier",)


def test_a_block_on_the_cpu_is_offered_no_offload():
    recording = record(*zoo.example("gpt", batch=256))
    offers = [maker().on_offer(value, recording) for value in recording.values]
    assert max(value.nbytes for value in recording.values) > 1 << 20
    assert planner.OFFLOAD not in {name for names in offers for name in names}


def test_the_link_is_timed_once_a_device(monkeypatch):
    timed = []

    class Clock:
        def __init__(self, device):
            pass

        def __call__(self, copy):
            timed.append(copy())
            return float(len(timed) << 26)

    monkeypatch.setattr(module, "Timer", Clock)
    monkeypatch.setattr(module, "pinned", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    codecs = maker()
    assert [codecs.byte_seconds(CPU) for _ in range(2)] == [(1.0, 2.0)] * 2
    assert [tensor.nbytes for tensor in timed] == [64 << 20] * 2
