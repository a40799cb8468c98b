"""Codecs as CUDA kernels: compiled by NVRTC and launched through CuPy, on torch's tensors and streams."""

from torch import Tensor

from ..codec import Codec
from .codecs import AsymmetricCodec, BitsCodec, ChannelCodec, GroupCodec, OutlierCodec, TokenCodec
from .launch import Kernels
from .modules import missing, warm_up
from .sums import channel_sums, rank_outliers

__all__ = [
    "AsymmetricCodec",
    "BitsCodec",
    "ChannelCodec",
    "GroupCodec",
    "Kernels",
    "OutlierCodec",
    "TokenCodec",
    "channel_sums",
    "make",
    "missing",
    "rank_outliers",
    "warm_up",
]


def make(
    name: str, group_size: int, channels: Tensor | None, scale: str, rounding: str, kernels: Kernels | None = None
) -> Codec:
    """Return the codec of a name in `ds_adacc.kernels.CODECS`, for tensors that `kernels` can reach.

    `kernels`: those of the tensors' CUDA device, if None. Raises RuntimeError if there is no CuPy to launch them.
    """
    if kernels is None and (reason := missing()):
        raise RuntimeError(reason)
    if name == "token":
        return TokenCodec(scale, rounding, kernels=kernels)
    if name == "bits":
        return BitsCodec(kernels=kernels)
    if name == "outlier":
        return OutlierCodec(group_size, channels, scale, rounding, kernels=kernels)
    if name == "asymmetric":
        return AsymmetricCodec(group_size, rounding, kernels=kernels)
    return {"group": GroupCodec, "channel": ChannelCodec}[name](group_size, scale, rounding, kernels=kernels)
