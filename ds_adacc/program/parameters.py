"""The parameters of a recorded block."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """The parameter's shape. Under ZeRO-3 its `shape` may be that of a partition, and `ds_shape` is the whole's."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def is_released(parameter: torch.Tensor) -> bool:
    """Whether ZeRO-3 has released the parameter: at most this rank's part of it is left."""
    return tuple(parameter.shape) != whole_shape(parameter)


class Parameters(Sequence[torch.Tensor]):
    """Parameters by index. They are not kept alive.

    The program may replace a layer of the block, or only its weight, while the variants of the block wait for calls
    with the old one. A function that holds parameters itself is made anew at every forward, so nothing tells when its
    model is gone.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._references = [*map(weakref.ref, parameters)]

    def __len__(self) -> int:
        return len(self._references)

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        parameter = self._references[index]()
        if parameter is None:
            raise RuntimeError(
                "a parameter of this block is gone: it was replaced, or its model was deleted; keep the model until "
                "backward has ended"
            )
        return parameter
