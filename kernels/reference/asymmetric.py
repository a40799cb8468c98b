"""Asymmetric INT4 and INT8, for tensors that are mostly on one side of zero: Softmax, Score."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..width import INT4, INT8, Width
from .quantized import QuantizedCodec, check_group_size, normal, reciprocal
from .tiles import Block, blocks

# 2 / 15 and 2 / 255 as float32, rounded down: 15 or 255 steps never pass the maximum.
STEP = {INT4: 0.13333332538604736, INT8: 0.00784313678741455}
GREATEST = torch.finfo(torch.float32).max


class AsymmetricCodec(QuantizedCodec):
    """Equation 3 of the Adacc paper, with all codes in use.

    scale = (max / 2 - min / 2) * (2 / 15), at most GREATEST / 8; offset = min + 8 * scale;
    code = clip(rint((x - offset) * (1 / scale)), -8, 7); x̂ = code * scale + offset, the product rounded before
    the addition. The minimum has the code -8 and the maximum 7. A minimum of zero and a constant come back exactly.
    The error is at most scale / 2, beside the rounding of float32. In INT8, 255, 128 and 127 take the places of
    15, 8 and 7.

    The paper's scale (max - min) / 16 with the offset (max + min) / 2 gives the maximum the code 8, which clips:
    the largest number of a group is off by a whole step. With fifteen steps it is not, and the steps are 1/15
    wider. Relative error ‖x - x̂‖ / ‖x‖ with groups of 128, the paper's formula → this one:
    softmax of 512 normal numbers 0.113 → 0.115, of deviation 2 0.098 → 0.084, of deviation 4 0.068 → 0.033;
    GELU output 0.075 → 0.076; Gaussian 0.099 → 0.100.

    A group whose scale would be subnormal comes back as its minimum.
    Raises ValueError if `group_size` is not an even number of at least two.
    """

    form = "asymmetric"
    parameters = 2

    def __init__(self, group_size: int, rounding: str = "nearest", width: Width = INT4) -> None:
        super().__init__(rounding, width)
        self.group_size = check_group_size(group_size)

    def blocks(self, shape: Sequence[int]) -> list[Block]:
        return blocks(math.prod(shape), self.group_size, channels=1)

    def quantize(self, block: Tensor) -> tuple[Tensor, ...]:
        low, high = block.amin(1, keepdim=True), block.amax(1, keepdim=True)
        half = self.width.half
        scale = (high / 2 - low / 2) * STEP[self.width]
        scale = normal(torch.where(scale < math.inf, scale.clamp_max(GREATEST / half), scale))
        offset = low + half * scale
        return (block - offset).mul_(reciprocal(scale)), scale, offset

    def dequantize_(self, values: Tensor, *parameters: Tensor) -> None:
        scale, offset = parameters
        values.mul_(scale).add_(offset)
