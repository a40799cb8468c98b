"""Codecs compiled for the CPU by Numba: the reference's payloads and results, nearly as fast as memory allows.

* `codecs`: the reference's codecs, with kernels in place of torch; `sums`: the sums by which outliers are known.
* `groups`, `channelwise`, `bits`: the kernels of the codecs.
* `quantize`: the arithmetic of INT4 and INT8, which these share; `memory`: numbers at an address, in any float dtype.
* `compiling`: how Numba compiles a kernel; `openmp`: runs it on torch's own threads.
"""

from ..codec import by_form
from .codecs import AsymmetricCodec, BitsCodec, ChannelCodec, GroupCodec, OutlierCodec, TokenCodec
from .sums import channel_sums

__all__ = ["CLASSES", "channel_sums"]

CLASSES = by_form(AsymmetricCodec, BitsCodec, ChannelCodec, GroupCodec, OutlierCodec, TokenCodec)
