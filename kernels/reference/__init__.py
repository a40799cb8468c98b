"""Codecs in plain torch: the readable reference that every other backend is tested against."""

from functools import partial

from ..codec import make as make_of
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
    codec.form: codec for codec in (AsymmetricCodec, BitsCodec, ChannelCodec, GroupCodec, OutlierCodec, TokenCodec)
}
make = partial(make_of, CLASSES)
