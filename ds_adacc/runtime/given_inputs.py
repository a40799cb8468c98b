"""Which inputs several calls of one forward hold for their backward, such as the states of an encoder.

All of them hold the same memory. So it counts once: the first call that saves the input owns it, and for the others it
is held already. A call that is given an input and does not save it owns nothing: its plan may drop it.

A view with gaps, such as `x[:, :, i]`, keeps all the memory alive from its first byte to its last. So if calls are
given views with gaps that keep nearly the same memory alive, these count once. Two inputs of one call both count. A
view without gaps counts with its own bytes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ds_adacc.program.geometry import Geometry, span


@dataclass(frozen=True)
class _Owner:
    """A call that holds an input: its block type, and the input's place there.

    `start`, `stop`: the addresses of the input's first byte, and of the byte after its last.
    """

    digest: str
    place: int
    storage: StorageWeakRef
    start: int
    stop: int

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it keeps nearly all of the tensor's memory alive. What it lacks is not counted: at most an eighth."""
        start, stop = span(tensor)
        shared = min(stop, self.stop) - max(start, self.start)
        return not self.storage.expired() and 8 * shared >= 7 * (stop - start)


class GivenInputs:
    """The inputs with a gradient that the calls of a pass have saved, as long as they live.

    An input without a gradient, such as a mask, stays with the program and counts for no call.
    """

    def __init__(self) -> None:
        self._owners: dict[Hashable, list[_Owner]] = {}

    def held(self, inputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The places of those inputs that an earlier call holds."""
        return tuple([n for n, each in enumerate(inputs) if each.requires_grad and self._owner(each)])

    def add(self, digest: str, saved: Mapping[int, torch.Tensor]) -> list[tuple[str, int]]:
        """Note the inputs that a call of this block type saves, by place.

        Returns, for each that an earlier call holds, that call's block type and the input's place there.
        """
        given = {place: tensor for place, tensor in saved.items() if tensor.requires_grad}
        owners = [owner for tensor in given.values() if (owner := self._owner(tensor)) is not None]
        for place, tensor in given.items():
            if self._owner(tensor) is None:  # of one tensor at two places, the first counts
                new = _Owner(digest, place, StorageWeakRef(tensor.untyped_storage()), *span(tensor))
                known = self._owners.get(_key(tensor), [])
                self._owners[_key(tensor)] = [*(each for each in known if not each.storage.expired()), new]
        return [(owner.digest, owner.place) for owner in owners]

    def _owner(self, tensor: torch.Tensor) -> _Owner | None:
        return next((owner for owner in self._owners.get(_key(tensor), ()) if owner.holds(tensor)), None)


def _key(tensor: torch.Tensor) -> Hashable:
    """What no two tensors have in common that live at once, unless they may keep the same memory alive."""
    if not Geometry.of(tensor).is_dense:
        return tensor.untyped_storage()._cdata
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version
