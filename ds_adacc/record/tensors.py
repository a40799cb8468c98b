"""The tensors of the recorded values of one call: those still alive, and the others rebuilt when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ds_adacc.program.geometry import Geometry, span
from ds_adacc.program.recorded_op import RecordedOp
from ds_adacc.program.recording import RecordedValue
from ds_adacc.program.replay import replay


@dataclass(slots=True)
class _Entry:
    """`tensor` is None once the value may die. The weak reference keeps the storage's identity from being reused."""

    tensor: torch.Tensor | None
    geometry: Geometry
    offset: int  # in its storage, in elements: `resize_` gives a storage other memory
    start: int
    stop: int
    storage: StorageWeakRef


class RecordedTensors:
    """The tensors by value index.

    While the block runs, a value is held only until it has proved to be rebuildable. From then on it dies as it does
    without ds_adacc, unless autograd saves it: so recording needs little more memory than a plain forward (Rule R2).

    `partly_written`: the values of which a kernel has left some memory as it was, or may have.
    """

    def __init__(self) -> None:
        self.partly_written: set[int] = set()
        self._entries: list[_Entry] = []
        self._values: Sequence[RecordedValue] = ()
        self._ops: Sequence[RecordedOp] = ()
        self._parameters: Sequence[torch.Tensor] = ()
        self.device = torch.device("cpu")  # on which the block runs; a mask, say, may be on the host

    def append(self, tensor: torch.Tensor) -> None:
        """Hold the tensor of a new value."""
        self._entries.append(_entry(tensor))
        if self.device.type == "cpu":
            self.device = tensor.device

    def span(self, index: int) -> tuple[int, int]:
        """The addresses of the value's first byte and of the byte after its last."""
        return self._entries[index].start, self._entries[index].stop

    def release(self, indices: Iterable[int | None]) -> None:
        """Let these values die: each can be rebuilt."""
        for index in indices:
            if index is not None:
                self._entries[index].tensor = None

    def hold(self, index: int) -> torch.Tensor:
        """Hold the value from now on, rebuilt if it has died. Returns the value's tensor."""
        tensor = self[index]
        if self._entries[index].tensor is None:
            self._entries[index] = _entry(tensor)
        return tensor

    def drop(self, indices: Iterable[int]) -> None:
        """Let these values die, and never take them from others who still hold them: they are rebuilt.

        Another alias of a tensor has no part in its count of writes.
        """
        gone = StorageWeakRef(torch.UntypedStorage(0))
        for index in indices:
            self._entries[index].tensor, self._entries[index].storage = None, gone

    def at_hand(self, index: int) -> torch.Tensor | None:
        """The value's tensor if it has not died."""
        entry = self._entries[index]
        if entry.tensor is not None:
            return entry.tensor
        storage = torch.UntypedStorage._new_with_weak_ptr(entry.storage.cdata)
        if storage is None:
            return None
        alias = torch.empty(0, dtype=entry.geometry.dtype, device=storage.device)
        return alias.set_(storage, entry.offset, entry.geometry.size, entry.geometry.stride)

    def rebuild_from(
        self, values: Sequence[RecordedValue], ops: Sequence[RecordedOp], parameters: Sequence[torch.Tensor]
    ) -> None:
        """Values that have died are rebuilt by these operators. While the block is recorded, the sequences grow."""
        self._values, self._ops, self._parameters = values, ops, parameters

    def __getitem__(self, index: int) -> torch.Tensor:
        """The value's tensor, rebuilt if it has died. Only a value that a policy could rebuild may be asked for."""
        tensor = self.at_hand(index)
        if tensor is not None:
            return tensor
        producer = self._values[index].producer
        assert producer is not None  # a policy rebuilds only what an operator has made
        op = self._ops[producer]
        inputs = {need: self[need] for need in op.needs}
        return replay(op, inputs.__getitem__, self._parameters)[op.outputs.index(index)]


def _entry(tensor: torch.Tensor) -> _Entry:
    start, stop = span(tensor)
    storage = StorageWeakRef(tensor.untyped_storage())
    return _Entry(tensor, Geometry.of(tensor), int(tensor.storage_offset()), start, stop, storage)
