"""Codecs as CUDA kernels: compiled by NVRTC and launched through CuPy, on torch's tensors and streams."""

from torch import Tensor

from ..codec import Codec
from ..codec import make as make_of
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


CLASSES = {
    codec.form: codec for codec in (AsymmetricCodec, BitsCodec, ChannelCodec, GroupCodec, OutlierCodec, TokenCodec)
}


def make(
    name: str, group_size: int, channels: Tensor | None, scale: str, rounding: str, kernels: Kernels | None = None
) -> Codec:
    """Return the codec of a name in `ds_adacc.kernels.CODECS`, for tensors that `kernels` can reach.

    `kernels`: those of the tensors' CUDA device, if None. Raises RuntimeError if there is no CuPy to launch them.
    """
    if kernels is None and (reason := missing()):
        raise RuntimeError(reason)
    return make_of(CLASSES, name, group_size, channels, scale, rounding, kernels=kernels)
