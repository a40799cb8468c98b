"""Which inputs several calls of one forward hold for their backward, such as the states of an encoder.

All of them hold the same memory. So it counts once: the first call that saves the input owns it, and for the others it
is held already. A call that is given an input and does not save it owns nothing: its plan may drop it.

A view with gaps, such as `x[:, :, i]`, keeps the whole of its memory alive. So all such views of one memory count as
one input. A view without gaps counts with its own bytes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ds_adacc.program.geometry import Geometry


class GivenInputs:
    """The inputs with a gradient that the calls of a pass have saved, as long as they live.

    An input without a gradient, such as a mask, stays with the program and counts for no call.
    """

    def __init__(self) -> None:
        self._owners: dict[Hashable, tuple[StorageWeakRef, str, int]] = {}

    def held(self, inputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The places of those inputs that an earlier call holds."""
        return tuple([n for n, each in enumerate(inputs) if each.requires_grad and self._owner(_key(each))])

    def add(self, digest: str, saved: Mapping[int, torch.Tensor]) -> list[tuple[str, int]]:
        """Note the inputs that a call of this block type saves, by place.

        Returns, for each that an earlier call holds, that call's block type and the input's place there.
        """
        keys = {place: _key(tensor) for place, tensor in saved.items() if tensor.requires_grad}
        owners = {place: self._owner(key) for place, key in keys.items()}
        for place, key in reversed(keys.items()):  # of one tensor at two places, the first counts
            if owners[place] is None:
                self._owners[key] = StorageWeakRef(saved[place].untyped_storage()), digest, place
        return [owner for owner in owners.values() if owner is not None]

    def _owner(self, key: Hashable) -> tuple[str, int] | None:
        storage, *owner = self._owners.get(key, (None,))
        return None if storage is None or storage.expired() else tuple(owner)


def _key(tensor: torch.Tensor) -> Hashable:
    """What no two tensors have in common that live at once, unless they keep the same memory alive."""
    if not Geometry.of(tensor).is_dense:
        return tensor.untyped_storage()._cdata
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version
