"""Codecs as CUDA kernels: compiled by NVRTC and launched through CuPy, on torch's tensors and streams."""

from ..codec import by_form
from .codecs import AsymmetricCodec, BitsCodec, ChannelCodec, GroupCodec, OutlierCodec, TokenCodec
from .compiler import missing, warm_up
from .sums import channel_sums

__all__ = ["CLASSES", "channel_sums", "missing", "warm_up"]

CLASSES = by_form(AsymmetricCodec, BitsCodec, ChannelCodec, GroupCodec, OutlierCodec, TokenCodec)
