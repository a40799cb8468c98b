"""The parameters of a recorded block."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence

import torch


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """The parameter's shape. Under ZeRO-3 its `shape` may be that of a partition, and `ds_shape` is the whole's."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


class Parameters(Sequence[torch.Tensor]):
    """Parameters by index. Those in `loose` belong to no module of the block, and are not kept alive.

    What is known of a block is forgotten with its modules. A function that holds parameters itself is made anew at
    every forward, so nothing tells when its model is gone.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], loose: Collection[torch.Tensor]) -> None:
        numbers = {id(parameter) for parameter in loose}
        self._held = [weakref.ref(each) if id(each) in numbers else each for each in parameters]

    def __len__(self) -> int:
        return len(self._held)

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        held = self._held[index]
        parameter = held() if isinstance(held, weakref.ref) else held
        if parameter is None:
            raise RuntimeError(
                "a parameter of this block is gone, as its model was deleted; keep the model until backward has ended"
            )
        return parameter
