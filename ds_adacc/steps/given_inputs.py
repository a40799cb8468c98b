"""Which inputs several calls of one forward hold for their backward, such as the states of an encoder.

All of them hold the same memory. So it counts once: the first call that saves the input owns it, and for the others it
is held already. A call that may only be recomputed from the input owns it for blocks of its own class alone: their
plans may need it even if its own does not. Of blocks of different classes, as at the two ends of a UNet's skip, often
only one needs it. The owner's plan retains the input, also where only the others need it.

A view with gaps, such as `x[:, :, i]`, keeps all the memory alive from its first byte to its last. So if calls are
given views with gaps that keep nearly the same memory alive, these count once. Two inputs of one call both count. A
view without gaps counts with its own bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ds_adacc.program.geometry import Geometry, storage_of
from ds_adacc.python_state.tensor_marks import stride_of


@dataclass(frozen=True)
class _Owner:
    """A call that holds an input: its block type, and the input's place there.

    `only_for`: it holds the input for blocks of this class alone; "": for all. `start`, `stop`: of a view with gaps,
    the addresses of its first byte and of the byte after its last; else 0.
    """

    digest: str
    place: int
    only_for: str
    storage: StorageWeakRef
    start: int
    stop: int

    def holds(self, start: int, stop: int) -> bool:
        """Whether it keeps nearly all of this memory alive. What it lacks is not counted: at most an eighth."""
        shared = min(stop, self.stop) - max(start, self.start)
        return 8 * shared >= 7 * (stop - start) and not self.storage.expired()


class GivenInputs:
    """The inputs with a gradient that the calls of a pass may hold, as long as they live.

    An input without a gradient, such as a mask, stays with the program and counts for no call.
    """

    def __init__(self) -> None:
        self._owners: dict[Hashable, list[_Owner]] = {}

    def held(self, inputs: Sequence[torch.Tensor], of_class: str = "") -> tuple[int, ...]:
        """The places of those inputs that an earlier call holds for a block of this class."""
        return tuple(
            [n for n, each in enumerate(inputs) if each.requires_grad and self._owner(of_class, *_memory(each))]
        )

    def owners(self, inputs: Iterable[torch.Tensor], of_class: str) -> list[tuple[str, int]]:
        """For each of these inputs that an earlier call holds for a block of this class: its block type, and the place.

        The place is the input's in that call.
        """
        found = (self._owner(of_class, *_memory(each)) for each in inputs if each.requires_grad)
        return [(owner.digest, owner.place) for owner in found if owner is not None]

    def add(
        self, digest: str, held: Mapping[int, torch.Tensor], unsaved: Collection[int] = (), of_class: str = ""
    ) -> list[tuple[str, int]]:
        """Note the inputs that a call of this block type may hold, by place.

        `unsaved`: the places of those that autograd does not save. `of_class`: the class of the block. Returns their
        `owners`.
        """
        earlier, new = [], []
        for place, tensor in held.items():
            if tensor.requires_grad:
                key, *span = _memory(tensor)
                owner = self._owner(of_class, key, *span)
                if owner is not None:
                    earlier.append((owner.digest, owner.place))
                else:
                    only_for = of_class if place in unsaved else ""
                    new.append((key, _Owner(digest, place, only_for, StorageWeakRef(tensor.untyped_storage()), *span)))
        for key, owner in new:
            if self._owner(of_class, key, owner.start, owner.stop) is None:  # of one tensor at two places, one counts
                self._owners.setdefault(key, []).append(owner)
        return earlier

    def _owner(self, of_class: str, key: Hashable, start: int, stop: int) -> _Owner | None:
        owners = (owner for owner in self._owners.get(key, ()) if owner.only_for in ("", of_class))
        return next((owner for owner in owners if owner.holds(start, stop)), None)


def _memory(tensor: torch.Tensor) -> tuple[Hashable, int, int]:
    """A key that two living tensors share only if they may keep the same memory alive.

    And for a view with gaps, the addresses of its first byte and of the byte after its last.
    """
    if tensor.is_contiguous() or Geometry.of(tensor).is_dense:
        return (tensor.data_ptr(), tensor.shape, stride_of(tensor), tensor.dtype, tensor._version), 0, 0
    start = tensor.data_ptr()
    return storage_of(tensor), start, start + Geometry.of(tensor).span
