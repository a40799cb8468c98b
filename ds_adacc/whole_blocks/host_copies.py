"""Holds in host memory what a call saves for which the ranks have yet to agree on a plan (Rule T8).

Such a call can neither drop what it saves nor hold it on the device: where a program asks for checkpointing, the device
may have no room for all of it. It comes in a step that records, so it waits for its copies.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ds_adacc.program.geometry import Geometry, why_not_plain
from ds_adacc.program.slots import Retained, Slot

Pack = Callable[[torch.Tensor], Slot]


class HostCopies:
    """The pack hook of a call that retains all. What `pack` retains on a CUDA device becomes a copy on the host."""

    def __init__(self, pack: Pack, moves: Callable[[torch.Tensor], bool] = lambda tensor: tensor.is_cuda) -> None:
        self._pack = pack
        self._moves = moves
        self._copies: dict[StorageWeakRef, tuple[int, torch.Tensor]] = {}  # by storage: the version, the bytes

    def pack(self, tensor: torch.Tensor) -> Slot:
        """A slot for a saved tensor. Views of one storage share its copy."""
        slot = self._pack(tensor)
        is_plain = why_not_plain(tensor) is None and not (tensor.is_conj() or tensor.is_neg())
        if not (isinstance(slot, Retained) and is_plain and self._moves(tensor)) or tensor.numel() == 0:
            return slot
        storage = tensor.untyped_storage()
        version, copy = self._copies.get(StorageWeakRef(storage), (None, None))
        if copy is None or version != tensor._version:
            copy = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).to("cpu", copy=True)
            self._copies[StorageWeakRef(storage)] = tensor._version, copy
        start = tensor.data_ptr() - storage.data_ptr()
        view = Geometry.of(tensor)
        return _OnHost(copy[start : start + view.span], view, tensor.device)


class _OnHost:
    """A saved tensor of which the host has the bytes. It lies on the device only while backward has it."""

    __slots__ = ("_bytes", "_device", "_view")

    def __init__(self, part: torch.Tensor, view: Geometry, device: torch.device) -> None:
        self._bytes = part
        self._view = view
        self._device = device

    def unpack(self) -> torch.Tensor:
        return self._view.part_of(self._bytes.to(self._device, copy=True))
