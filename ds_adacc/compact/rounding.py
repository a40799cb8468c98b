"""Stochastic rounding of weights to 16 bits: on average, updates smaller than a weight's last digit are not lost."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_adacc.kernels.reference.philox import uniform


def round_stochastically(values: Tensor, dtype: torch.dtype, start: int, key: int) -> Tensor:
    """Round fp32 `values` (n,) to `dtype`, bf16 or fp16: up or down, so that the expectation is the value.

    The number that decides for element i is that of element `start + i` in Philox under `key`: the same for a weight as
    a whole and for its parts on several ranks.
    """
    nearest = values.to(dtype)
    error = values - nearest.float()
    # The neighbour on the other side of the value: read as whole numbers, floating-point numbers count away from zero.
    away = torch.where((error > 0) != nearest.signbit(), 1, -1).to(torch.int16)
    neighbour = (nearest.view(torch.int16) + away).view(dtype)
    gap = (neighbour.float() - nearest.float()).abs()
    lot = uniform(start, start + len(values), key, values.device)
    return torch.where(lot * gap < error.abs(), neighbour, nearest)
