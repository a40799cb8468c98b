"""Codecs in plain torch: the readable reference that every other backend is tested against.

* `quantized`: what the INT4 and INT8 codecs share; `symmetric`, `channelwise`, `asymmetric`, `outlier`: these codecs.
* `tiles`: the parts of a tensor that they take one by one; `philox`: the random numbers of stochastic rounding.
* `bits`: the lossless codec, of one bit an element.
* `scores`: which channels are outliers.
"""

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
