import pytest
import torch
from ds_adacc.kernels import BACKENDS, CODECS, Codec, make_codec


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CODECS)
def test_every_codec_is_made(name, backend):
    channels = torch.tensor([1]) if name == "outlier" else None
    codec = make_codec(name, backend=backend, group_size=128, channels=channels)
    assert isinstance(codec, Codec)
    assert codec.name == name
    assert codec.lossless == (name == "bits")


@pytest.mark.parametrize(
    ("name", "backend", "message"),
    [
        (
            "asymetric",
            "reference",
            "unknown codec 'asymetric'; did you mean 'asymmetric'? "
            "(valid: 'group', 'token', 'channel', 'asymmetric', 'outlier', 'bits')",
        ),
        (
            "xyz",
            "reference",
            "unknown codec 'xyz' (valid: 'group', 'token', 'channel', 'asymmetric', 'outlier', 'bits')",
        ),
        ("group", "referense", "unknown backend 'referense'; did you mean 'reference'? (valid: 'reference')"),
        ("group", "cuda", "unknown backend 'cuda' (valid: 'reference')"),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(name, backend, message):
    with pytest.raises(ValueError) as error:
        make_codec(name, backend=backend, group_size=128)
    assert str(error.value) == message


@pytest.mark.parametrize("group_size", [-2, 0, 1, 3, 127])
@pytest.mark.parametrize("name", ["group", "channel", "asymmetric", "outlier"])
def test_odd_group_sizes_are_refused(name, group_size):
    channels = torch.tensor([1]) if name == "outlier" else None
    with pytest.raises(ValueError, match=f"group_size must be even and at least 2.*got {group_size}"):
        make_codec(name, backend="reference", group_size=group_size, channels=channels)


def test_channels_are_for_outliers_only():
    with pytest.raises(ValueError, match="'outlier', which needs them; got None for 'outlier'"):
        make_codec("outlier", backend="reference", group_size=128)
    with pytest.raises(ValueError, match="for 'group'"):
        make_codec("group", backend="reference", group_size=128, channels=torch.tensor([1]))
    for channels in (torch.tensor([1], dtype=torch.int32), torch.tensor(1)):
        with pytest.raises(ValueError, match="channels must be int64"):
            make_codec("outlier", backend="reference", group_size=128, channels=channels)
