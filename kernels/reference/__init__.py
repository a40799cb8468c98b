"""Codecs in plain torch: the readable reference that every other backend is tested against."""

from torch import Tensor

from ..codec import Codec
from .asymmetric import AsymmetricCodec
from .bits import BitsCodec, is_two_valued
from .channelwise import ChannelCodec
from .outlier import OutlierCodec, channel_scores, rank_outliers
from .symmetric import GroupCodec, TokenCodec

__all__ = [
    "AsymmetricCodec",
    "BitsCodec",
    "ChannelCodec",
    "GroupCodec",
    "OutlierCodec",
    "TokenCodec",
    "channel_scores",
    "is_two_valued",
    "make",
    "rank_outliers",
]


def make(name: str, group_size: int, channels: Tensor | None) -> Codec:
    """Return the codec of a name in `ds_adacc.kernels.CODECS`; only "outlier" takes, and needs, `channels`."""
    if name == "token":
        return TokenCodec()
    if name == "bits":
        return BitsCodec()
    if name == "outlier":
        return OutlierCodec(group_size, channels)
    return {"group": GroupCodec, "channel": ChannelCodec, "asymmetric": AsymmetricCodec}[name](group_size)
