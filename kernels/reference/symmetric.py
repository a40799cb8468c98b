"""Symmetric INT4: groups of neighbours in memory, or one group a token."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..codec import rows_and_channels
from .int4 import Int4Codec, check_group_size, normal, reciprocal
from .pieces import Block, blocks


class SymmetricCodec(Int4Codec):
    """Equation 2 of the Adacc paper, with the scale anchored at the signed extreme of the group.

    scale = extreme / -8, where extreme is the number of the greatest magnitude (the negative one, if both signs
    have it); code = clip(rint(x * (1 / scale)), -8, 7); x̂ = code * scale. The error is at most |scale| / 2,
    or |scale| for numbers of the other sign that are nearly as great as the extreme and are clipped.

    The paper's max|x| / 8, for the `scale` "paper", clips a positive extreme to 7/8 of itself; anchored, the extreme
    always comes back exactly. A group whose scale would be subnormal (all of it below 1e-37) comes back as zeros.
    """

    def __init__(self, scale: str = "extreme", rounding: str = "nearest") -> None:
        super().__init__(rounding)
        self.scale = scale

    def quantize(self, block: Tensor) -> tuple[Tensor, ...]:
        low, high = block.amin(1, keepdim=True), block.amax(1, keepdim=True)
        extreme = torch.where(high > -low, high, low)
        scale = normal(extreme.abs() / 8 if self.scale == "paper" else extreme / -8)
        return block * reciprocal(scale), scale

    def dequantize_(self, values: Tensor, *parameters: Tensor) -> None:
        (scale,) = parameters
        values.mul_(scale)


class GroupCodec(SymmetricCodec):
    """Groups of `group_size` neighbours of the flat array; the last group may be shorter.

    Raises ValueError if `group_size` is not an even number of at least two.
    """

    name = "group"

    def __init__(self, group_size: int, scale: str = "extreme", rounding: str = "nearest") -> None:
        super().__init__(scale, rounding)
        self.group_size = check_group_size(group_size)

    def blocks(self, shape: Sequence[int]) -> list[Block]:
        return blocks(math.prod(shape), self.group_size, channels=1)


class TokenCodec(SymmetricCodec):
    """One group a row: the per-token quantization that the paper compares with (figure 3(b)(i))."""

    name = "token"

    def blocks(self, shape: Sequence[int]) -> list[Block]:
        return blocks(math.prod(shape), rows_and_channels(shape)[1], channels=1)
