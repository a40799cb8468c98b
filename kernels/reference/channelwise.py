"""Channel-wise symmetric INT4 and INT8, for Query, Key and Value."""

from collections.abc import Sequence

from ..codec import rows_and_channels
from ..width import INT4, Width
from .quantized import check_group_size
from .symmetric import SymmetricCodec
from .tiles import Block, blocks


class ChannelCodec(SymmetricCodec):
    """One scale for each channel and each run of `group_size` rows; codes in memory order, nothing transposed.

    The last run may be shorter. Raises ValueError if `group_size` is not an even number of at least two.
    """

    form = "channel"

    def __init__(self, group_size: int, scale: str = "extreme", rounding: str = "nearest", width: Width = INT4) -> None:
        super().__init__(scale, rounding, width)
        self.group_size = check_group_size(group_size)

    def blocks(self, shape: Sequence[int]) -> list[Block]:
        rows, channels = rows_and_channels(shape)
        return blocks(rows, self.group_size, channels)
