import pytest
import torch

from ds_adacc.kernels import (
    CODECS,
    ROUNDINGS,
    SCALES,
    Codec,
    cuda,
    make_codec,
    rank_outliers,
    separates_outliers,
    why_unusable,
)

ALL = (
    "'group', 'token', 'channel', 'asymmetric', 'outlier', 'group8', 'token8', 'channel8', 'asymmetric8', 'outlier8', "
    "'bits'"
)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", CODECS)
def test_every_codec_is_made(name, backend, scale, rounding):
    channels = torch.tensor([1]) if separates_outliers(name) else None
    codec = make_codec(name, backend=backend, group_size=128, channels=channels, scale=scale, rounding=rounding)
    assert isinstance(codec, Codec)
    assert codec.name == name
    assert codec.lossless == (name == "bits")


@pytest.mark.skipif(cuda.missing() is None, reason="needs a machine where CUDA codecs cannot run")
def test_cuda_codecs_say_what_they_miss():
    with pytest.raises(RuntimeError) as error:
        make_codec("group", backend="cuda", group_size=128)
    assert str(error.value) == cuda.missing() == why_unusable("cuda")


def test_cuda_codecs_need_a_device_too(monkeypatch):
    monkeypatch.setattr(cuda, "missing", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert why_unusable("cuda") == "CUDA codecs need a CUDA device, and torch finds none"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert why_unusable("cuda") == ""


def test_a_backend_that_runs_here_or_does_not_exist():
    assert why_unusable("reference") == why_unusable("cpu") == ""
    with pytest.raises(ValueError, match="unknown backend 'gpu'"):
        why_unusable("gpu")


@pytest.mark.parametrize(
    ("name", "backend", "message"),
    [
        (
            "asymetric",
            "reference",
            f"unknown codec 'asymetric'; did you mean 'asymmetric'? (valid: {ALL})",
        ),
        (
            "xyz",
            "reference",
            f"unknown codec 'xyz' (valid: {ALL})",
        ),
        (
            "group",
            "referense",
            "unknown backend 'referense'; did you mean 'reference'? (valid: 'reference', 'cpu', 'cuda')",
        ),
        ("group", "tpu", "unknown backend 'tpu'; did you mean 'cpu'? (valid: 'reference', 'cpu', 'cuda')"),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(name, backend, message):
    with pytest.raises(ValueError) as error:
        make_codec(name, backend=backend, group_size=128)
    assert str(error.value) == message


def test_unknown_options_are_answered_with_the_nearest():
    with pytest.raises(
        ValueError, match=r"unknown scale 'papre'; did you mean 'paper'\? \(valid: 'extreme', 'paper'\)"
    ):
        make_codec("group", backend="reference", group_size=128, scale="papre")
    with pytest.raises(ValueError, match=r"unknown rounding 'up' \(valid: 'nearest', 'stochastic'\)"):
        make_codec("group", backend="reference", group_size=128, rounding="up")
    with pytest.raises(ValueError, match="unknown backend 'gpu'"):
        rank_outliers(torch.ones(2, 2), 3.0, backend="gpu")


@pytest.mark.parametrize("group_size", [-2, 0, 1, 3, 127])
@pytest.mark.parametrize("name", ["group", "channel", "asymmetric", "outlier", "outlier8"])
def test_odd_group_sizes_are_refused(name, group_size):
    channels = torch.tensor([1]) if separates_outliers(name) else None
    with pytest.raises(ValueError, match=f"group_size must be even and at least 2.*got {group_size}"):
        make_codec(name, backend="reference", group_size=group_size, channels=channels)


def test_two_codecs_separate_outliers():
    assert [name for name in (*CODECS, "retain", None) if separates_outliers(name)] == ["outlier", "outlier8"]


def test_channels_are_for_outliers_only():
    for name in ("outlier", "outlier8"):
        with pytest.raises(ValueError, match=f"'outlier' and 'outlier8', which need them; got None for '{name}'"):
            make_codec(name, backend="reference", group_size=128)
    with pytest.raises(ValueError, match="for 'group'"):
        make_codec("group", backend="reference", group_size=128, channels=torch.tensor([1]))
    for channels in (torch.tensor([1], dtype=torch.int32), torch.tensor(1)):
        with pytest.raises(ValueError, match="channels must be int64"):
            make_codec("outlier", backend="reference", group_size=128, channels=channels)
