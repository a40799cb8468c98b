"""Codecs as CUDA kernels: compiled by NVRTC and launched through CuPy, on torch's tensors and streams.

* `codecs`: the reference's codecs, with launches in place of torch; `sums`: the sums by which outliers are known.
* `launch`: one launch, and codecs that work out theirs once for each shape; `kernel`: the type of a compiled kernel.
* `compiler`: compiles what is in `sources/`, keeps it on disk, and loads it. Of the sources, `groups.cu`, `channel.cu`
  and `bits.cu` are named after the codecs, and `blocks.cu` is for tensors that do not suit the first two.
"""

from ..codec import by_form
from .codecs import AsymmetricCodec, BitsCodec, ChannelCodec, GroupCodec, OutlierCodec, TokenCodec
from .compiler import missing, warm_up
from .sums import channel_sums

__all__ = ["CLASSES", "channel_sums", "missing", "warm_up"]

CLASSES = by_form(AsymmetricCodec, BitsCodec, ChannelCodec, GroupCodec, OutlierCodec, TokenCodec)
