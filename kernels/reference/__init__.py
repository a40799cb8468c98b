"""Codecs in plain torch: the readable reference that every other backend is tested against."""

from ..codec import by_form
from .asymmetric import AsymmetricCodec
from .bits import BitsCodec, is_two_valued
from .channelwise import ChannelCodec
from .outlier import OutlierCodec
from .scores import channel_sums, rank_by_sums
from .symmetric import GroupCodec, TokenCodec

__all__ = [
    "CLASSES",
    "channel_sums",
    "is_two_valued",
    "rank_by_sums",
]

CLASSES = by_form(AsymmetricCodec, BitsCodec, ChannelCodec, GroupCodec, OutlierCodec, TokenCodec)
