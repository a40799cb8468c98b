"""Codecs in plain torch: the readable reference that every other backend is tested against."""

from torch import Tensor

from ..codec import Codec, constructor_arguments
from .asymmetric import AsymmetricCodec
from .bits import BitsCodec, is_two_valued
from .channelwise import ChannelCodec
from .outlier import OutlierCodec
from .scores import channel_scores, channel_sums, rank_by_sums, rank_outliers
from .symmetric import GroupCodec, TokenCodec

__all__ = [
    "AsymmetricCodec",
    "BitsCodec",
    "ChannelCodec",
    "GroupCodec",
    "OutlierCodec",
    "TokenCodec",
    "channel_scores",
    "channel_sums",
    "is_two_valued",
    "make",
    "rank_by_sums",
    "rank_outliers",
]


CLASSES = {
    codec.name: codec for codec in (AsymmetricCodec, BitsCodec, ChannelCodec, GroupCodec, OutlierCodec, TokenCodec)
}


def make(name: str, group_size: int, channels: Tensor | None, scale: str, rounding: str) -> Codec:
    """Return the codec of a name in `ds_adacc.kernels.CODECS`; only "outlier" takes, and needs, `channels`."""
    return CLASSES[name](*constructor_arguments(name, group_size, channels, scale, rounding))
