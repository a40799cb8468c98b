"""The sums by which outlier channels are known. Scores and ranking follow by torch, nothing on the host."""

import torch
from torch import Tensor

from ..codec import rows_and_channels
from ..reference.scores import RUN
from .kernel import Kernels
from .launch import SUFFIX, Launch, ceil_div, kernels_of

BLOCK = 256  # threads


def channel_sums(x: Tensor, kernels: Kernels | None = None) -> Tensor:
    """Return what `reference.channel_sums` does, to the bit; `x` is contiguous, of a dtype that quantizing codecs take.

    `kernels`: those of the tensor's CUDA device, if None. Raises TypeError for another dtype, ValueError if `x` is
    not contiguous.
    """
    if x.dtype not in SUFFIX:
        raise TypeError(f"channel sums take {', '.join(map(str, SUFFIX))}; got {x.dtype}")
    if not x.is_contiguous():
        raise ValueError(f"channel sums take contiguous tensors; got strides {x.stride()} for shape {tuple(x.shape)}")
    rows, channels = rows_and_channels(x.shape)
    runs, across = ceil_div(rows, RUN), ceil_div(channels, BLOCK)
    total = torch.zeros(channels, dtype=torch.float64, device=x.device)
    if not x.numel():
        return total
    get = (kernels or kernels_of(x.device)).get
    sums = torch.empty(runs, channels, dtype=torch.float64, device=x.device)
    each = Launch(get("sums.cu", f"sums_runs_{SUFFIX[x.dtype]}"), runs * across, BLOCK, (rows, channels))
    each(x.data_ptr(), sums.data_ptr())
    Launch(get("sums.cu", "sums_total"), across, BLOCK, (runs, channels))(sums.data_ptr(), total.data_ptr())
    return total
