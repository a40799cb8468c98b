"""Symmetric INT4 and INT8: groups of neighbours in memory, or one group a token."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..codec import rows_and_channels
from ..width import INT4, Width
from .quantized import QuantizedCodec, check_group_size, normal, reciprocal
from .tiles import Block, blocks


class SymmetricCodec(QuantizedCodec):
    """Equation 2 of the Adacc paper, with the scale anchored at the signed extreme of the group.

    scale = extreme / -8, where extreme is the number of the greatest magnitude (the negative one, if both signs
    have it); code = clip(rint(x * (1 / scale)), -8, 7); x̂ = code * scale. The error is at most |scale| / 2,
    or |scale| for numbers of the other sign that are nearly as great as the extreme and are clipped. In INT8, 128 and
    127 take the places of 8 and 7.

    The paper's max|x| / 8, for the `scale` "paper", clips a positive extreme to 7/8 of itself; anchored, the extreme
    always comes back exactly. A group whose scale would be subnormal (all of it below 1e-37; in INT8, 2e-36) comes
    back as zeros.
    """

    def __init__(self, scale: str = "extreme", rounding: str = "nearest", width: Width = INT4) -> None:
        super().__init__(rounding, width)
        self.scale = scale

    def quantize(self, block: Tensor) -> tuple[Tensor, ...]:
        low, high = block.amin(1, keepdim=True), block.amax(1, keepdim=True)
        extreme = torch.where(high > -low, high, low)
        half = self.width.half
        scale = normal(extreme.abs() / half if self.scale == "paper" else extreme / -half)
        return block * reciprocal(scale), scale

    def dequantize_(self, values: Tensor, *parameters: Tensor) -> None:
        (scale,) = parameters
        values.mul_(scale)


class GroupCodec(SymmetricCodec):
    """Groups of `group_size` neighbours of the flat array; the last group may be shorter.

    Raises ValueError if `group_size` is not an even number of at least two.
    """

    form = "group"

    def __init__(self, group_size: int, scale: str = "extreme", rounding: str = "nearest", width: Width = INT4) -> None:
        super().__init__(scale, rounding, width)
        self.group_size = check_group_size(group_size)

    def blocks(self, shape: Sequence[int]) -> list[Block]:
        return blocks(math.prod(shape), self.group_size, channels=1)


class TokenCodec(SymmetricCodec):
    """One group a row: the per-token quantization that the paper compares with (figure 3(b)(i))."""

    form = "token"

    def blocks(self, shape: Sequence[int]) -> list[Block]:
        return blocks(math.prod(shape), rows_and_channels(shape)[1], channels=1)
