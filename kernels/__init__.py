"""Codecs that shrink activations. This package knows nothing of blocks, plans or DeepSpeed.

In comes a tensor; out comes a payload, and later the tensor again. There are three backends with the same payloads and
results, to the bit, each in a room of its own:

* `reference`: plain torch, on any device; the readable definition that the others are tested against.
* `cpu`: compiled by Numba, on torch's own threads.
* `cuda`: CUDA sources, compiled by NVRTC and launched through CuPy.

`codec` has what all codecs offer, `width` the number of bits of a code, and `atomic_write` files for several processes.
"""

import difflib
from types import ModuleType

import torch
from torch import Tensor

from . import reference
from .codec import FORMS, Codec, make
from .reference import is_two_valued

__all__ = [
    "BACKENDS",
    "CODECS",
    "ROUNDINGS",
    "SCALES",
    "Codec",
    "choose_backend",
    "is_two_valued",
    "make_codec",
    "rank_outliers",
    "separates_outliers",
    "why_unusable",
]

CODECS = tuple(FORMS)
BACKENDS = ("reference", "cpu", "cuda")
SCALES = ("extreme", "paper")
ROUNDINGS = ("nearest", "stochastic")
_SEPARATING = tuple(name for name, (form, _) in FORMS.items() if form == "outlier")


def make_codec(
    name: str,
    *,
    backend: str,
    group_size: int,
    channels: Tensor | None = None,
    scale: str = "extreme",
    rounding: str = "nearest",
    generator: torch.Generator | None = None,
) -> Codec:
    """Return the codec `name` of `backend`. The backends' payloads and results are the same to the bit.

    "group", "token", "channel", "asymmetric" and "outlier" quantize to INT4; "group8" and so on are the same in INT8.
    "bits" is lossless, for tensors of two values.

    `group_size`: elements (for "channel": rows) that share a scale; even. "token" and "bits" ignore it.
    `channels`: the outlier channels, int64 (capacity,), for codecs that separate them and for no other.
    `scale`: "extreme" anchors it at the signed extreme of the group; "paper" is max|x| / 8 (equation 2 of the Adacc
    paper), max|x| / 128 in INT8. "asymmetric" and "bits" ignore it.
    `rounding`: to the "nearest" code, or "stochastic", which is unbiased. "bits" ignores it.
    `generator`: the CPU generator from which stochastic rounding draws its seeds; None: torch's default one.

    Raises ValueError for a name, backend, scale or rounding that does not exist, an odd group size, or channels
    that are missing or out of place; RuntimeError if the backend cannot run here.
    """
    _check_choice("codec", name, CODECS)
    _check_choice("scale", scale, SCALES)
    _check_choice("rounding", rounding, ROUNDINGS)
    if separates_outliers(name) != (channels is not None):
        valid = " and ".join(map(repr, _SEPARATING))
        raise ValueError(f"channels are for the codecs {valid}, which need them; got {channels} for {name!r}")
    codec = make(_backend(backend).CLASSES, name, group_size, channels, scale, rounding)
    codec.generator = generator
    return codec


def why_unusable(backend: str) -> str:
    """Return why a backend cannot run here, or "". Raises ValueError for a backend that does not exist."""
    try:
        _backend(backend)
    except RuntimeError as error:
        return str(error)
    if backend == "cuda" and not torch.cuda.is_available():  # the packages are there, as on a cluster's login node
        return "CUDA codecs need a CUDA device, and torch finds none"
    return ""


def separates_outliers(name: str | None) -> bool:
    """Return whether the name is that of a codec which keeps outlier channels raw."""
    return name in _SEPARATING


def choose_backend(device: torch.device) -> tuple[str, str]:
    """Return the fastest backend that runs on `device`, and why a faster one does not run there, or "".

    On a CUDA device this first compiles all kernels, or loads them from the disk.
    """
    if device.type == "cpu":
        from .cpu.openmp import OPENMP

        return "cpu", OPENMP.limit
    if device.type != "cuda":
        return "reference", ""
    from . import cuda

    if reason := cuda.missing():
        return "reference", f"they run as plain PyTorch: {reason}"
    cuda.warm_up(device)
    return "cuda", ""


def rank_outliers(x: Tensor, threshold: float, *, backend: str = "reference") -> tuple[Tensor, Tensor, Tensor]:
    """Return (order, count, is_finite): what the channels of `x` tell of its outliers, on the device.

    `order` has the channels by falling score, int64 (channels,). Channels of the same score keep their order. `count`
    says how many exceed `threshold`, int64 (). `is_finite` is False if a channel holds Inf or NaN, bool (). `x` is
    contiguous. The host need not wait for any of them.

    Raises ValueError for a backend that does not exist, RuntimeError if it cannot run here.
    """
    return reference.rank_by_sums(_backend(backend).channel_sums(x), threshold)


def _backend(name: str) -> ModuleType:
    """Return the package of a backend. Raises as `rank_outliers` does."""
    _check_choice("backend", name, BACKENDS)
    if name == "cpu":
        from . import cpu

        return cpu
    if name == "cuda":
        from . import cuda

        if reason := cuda.missing():
            raise RuntimeError(reason)
        return cuda
    return reference


def _check_choice(kind: str, value: str, valid: tuple[str, ...]) -> None:
    if value in valid:
        return
    nearest = difflib.get_close_matches(value, valid, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"unknown {kind} {value!r}{hint} (valid: {', '.join(map(repr, valid))})")
