"""The codecs' backend follows the device, and is told once where a faster one is missing."""

import torch
from ds_adacc.kernels import SCALES, cpu, cuda, reference

from ds_adacc import measure
from ds_adacc.config import load
from ds_adacc.measure import CodecMaker

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def maker(**section):
    return CodecMaker(load({"adacc": section}))


def test_auto_is_the_compiled_backend_on_the_cpu():
    assert isinstance(maker().make("group", CPU, None), cpu.GroupCodec)


def test_a_named_backend_is_taken():
    assert type(maker(backend="reference").make("group", CPU, None)) is reference.GroupCodec


def test_scale_and_rounding_are_those_of_the_section():
    x = torch.tensor([[1.0, 2.0, 4.0, 8.1]])
    payloads = [maker(scale=scale, backend="reference").make("group", CPU, None).compress(x) for scale in SCALES]
    assert not torch.equal(payloads[0][1], payloads[1][1])
    codec = maker(rounding="stochastic").make("group", CPU, None)
    x = torch.rand(64, 128)
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(codec.compress(x)[0])
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_a_cuda_device_without_cupy_is_told_of_once(caplog, monkeypatch):
    monkeypatch.setattr(cuda, "missing", lambda: "CUDA codecs need CuPy: pip install 'ds-adacc[cuda13]'")
    codecs = maker()
    with caplog.at_level("WARNING", logger="ds_adacc"):
        made = [codecs.make("group", CUDA, None) for _ in range(3)]
    assert all(type(codec) is reference.GroupCodec for codec in made)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "cuda:0" in warning and "pip install 'ds-adacc[cuda13]'" in warning


def test_a_cuda_device_with_cupy_is_warmed_up_once(monkeypatch):
    warmed = []
    monkeypatch.setattr(cuda, "missing", lambda: None)
    monkeypatch.setattr(cuda, "warm_up", warmed.append)
    monkeypatch.setattr(measure, "make_codec", lambda name, **options: options["backend"])
    codecs = maker()
    assert [codecs.make("group", CUDA, None) for _ in range(3)] == ["cuda"] * 3
    assert warmed == [CUDA]
