"""Codecs compiled for the CPU by Numba: the reference's payloads and results, nearly as fast as memory allows."""

from ..codec import by_form
from .codecs import AsymmetricCodec, BitsCodec, ChannelCodec, GroupCodec, OutlierCodec, TokenCodec
from .sums import channel_sums

__all__ = ["CLASSES", "channel_sums"]

CLASSES = by_form(AsymmetricCodec, BitsCodec, ChannelCodec, GroupCodec, OutlierCodec, TokenCodec)
