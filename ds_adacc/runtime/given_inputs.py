"""Which inputs several calls of one forward are given, such as the states of an encoder.

Each call holds them for its backward, and all of them hold the same memory. So it counts once: the first call that is
given the input owns it, and for the others it is held already.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class GivenInputs:
    """The inputs with a gradient that the calls of a pass have been given, as long as they live.

    An input without a gradient, such as a mask, stays with the program and counts for no call.
    """

    def __init__(self) -> None:
        self._owners: dict[Hashable, tuple[StorageWeakRef, str, int]] = {}

    def held(self, inputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The places of those inputs that an earlier call has been given."""
        return tuple([n for n, each in enumerate(inputs) if each.requires_grad and self._owner(_key(each))])

    def add(self, digest: str, inputs: Sequence[torch.Tensor]) -> list[tuple[str, int]]:
        """Note the inputs of a call of this block type.

        Returns, for each that an earlier call was given, that call's block type and the input's place there.
        """
        owners = []
        for place, tensor in enumerate(inputs):
            if tensor.requires_grad:
                key = _key(tensor)
                owner = self._owner(key)
                if owner is None:
                    self._owners[key] = StorageWeakRef(tensor.untyped_storage()), digest, place
                else:
                    owners.append(owner)
        return owners

    def _owner(self, key: Hashable) -> tuple[str, int] | None:
        storage, *owner = self._owners.get(key, (None,))
        return None if storage is None or storage.expired() else tuple(owner)


def _key(tensor: torch.Tensor) -> Hashable:
    """What no two tensors have in common that live at once, unless they are the same data."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version
