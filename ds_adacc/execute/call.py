"""The state of one call of a block: its holders, filled position by position by the pack hook."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ds_adacc.execute.bound_policy import BoundPolicy, Instruction, rows
from ds_adacc.execute.holders import Compressed, Holder, Offloaded, Rebuilt, Replay, Retained
from ds_adacc.planner import OFFLOAD, RETAIN
from ds_adacc.record.geometry import Geometry, span
from ds_adacc.record.saved import ParameterSlot, Slot, ValueSlot, keep


class Call:
    """Lives through the forward of one call; afterwards the slots alone keep the holders they need.

    A position that does not look as recorded (other routing of a mixture of experts) is retained as it comes, and
    so are all that follow: what was dropped before it can be rebuilt from what was saved before it. A value seen
    again must lie where it was first seen. The first sighting is known by its looks alone: what decides a block's
    course is guarded, and the recorder refuses to rebuild what is first saved after Python has read data.
    """

    __slots__ = ("_on_divergence", "_position", "_seen", "bound", "diverged", "holders")

    def __init__(
        self,
        bound: BoundPolicy,
        inputs: Sequence[torch.Tensor],
        on_divergence: Callable[[BoundPolicy, int], None] | None = None,
    ) -> None:
        """`on_divergence` is told the bound policy and the number of the first saved tensor that is not as recorded."""
        self._on_divergence = on_divergence
        self.bound = bound
        self.holders = _open(bound)
        self._position = 0
        self._seen: dict[int, tuple[int, StorageWeakRef | None]] = {}
        self.diverged = False
        for index in bound.inputs:
            value = bound.recording.values[index]
            if value.origin == "input":
                tensor = inputs[value.source]
            else:
                tensor = _buffer(bound, value.source)
                if not _looks_like(tensor, value.geometry):
                    self._diverge()
                    return
            self._seen[index] = tensor.data_ptr(), None
            self.holders[index].fill(tensor.detach())

    def pack(self, tensor: torch.Tensor) -> Slot:
        """The pack hook."""
        number = self._position
        self._position = number + 1
        instructions = self.bound.instructions
        if self.diverged:
            return self._keep(tensor)
        if number >= len(instructions) or not self._is_expected(instructions[number], tensor):
            self._diverge()
            return self._keep(tensor)
        instruction = instructions[number]
        if instruction.value is not None:
            slot: Slot = self._save(instruction, tensor)
        elif instruction.parameter is not None:
            slot = ParameterSlot(instruction.parameter, instruction.view)
        else:
            slot = self._keep(tensor)
        for index in instruction.release:
            self.holders[index].pending = None
        return slot

    @property
    def next_instruction(self) -> Instruction | None:
        """What the plan says of the next position, if the call still goes as recorded."""
        instructions = self.bound.instructions
        return None if self.diverged or self._position >= len(instructions) else instructions[self._position]

    def close(self) -> None:
        """Let go of the holders, at the end of the forward."""
        self.holders = {}

    def _is_expected(self, instruction: Instruction, tensor: torch.Tensor) -> bool:
        if instruction.dtype is None:
            return True
        if (
            tensor.shape != instruction.size
            or tensor.stride() != instruction.stride
            or tensor.dtype is not instruction.dtype
        ):
            return False
        if instruction.parameter is not None:
            return tensor.data_ptr() == instruction.parameter.data_ptr() + instruction.start
        if instruction.is_first:
            return instruction.fits(tensor)
        address, storage = self._seen[instruction.value]
        return tensor.data_ptr() == address + instruction.start and (storage is None or not storage.expired())

    def _save(self, instruction: Instruction, tensor: torch.Tensor) -> ValueSlot:
        holder = self.holders[instruction.value]
        if instruction.again:  # by then its memory may have been freed and given to another tensor
            self._seen[instruction.value] = (
                tensor.data_ptr() - instruction.start,
                StorageWeakRef(tensor.untyped_storage()),
            )
        if instruction.fill:
            holder.fill(instruction.whole(tensor.detach()))
        elif instruction.hold:
            holder.hold(instruction.whole(tensor.detach()))
        return ValueSlot(holder, instruction.view)

    def _keep(self, tensor: torch.Tensor) -> Slot:
        """A slot for a tensor that the plan does not know; a parameter's alias would keep a gathered one alive."""
        if tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg()):
            start, stop = span(tensor)
            for parameter in self.bound.recording.parameters:
                low, high = span(parameter)
                if low <= start < stop <= high:
                    return ParameterSlot(parameter, Geometry.of(tensor, low))
        return keep(tensor)

    def _diverge(self) -> None:
        self.diverged = True
        if self._on_divergence is not None:
            self._on_divergence(self.bound, self._position)


def _open(bound: BoundPolicy) -> dict[int, Holder]:
    """Empty holders for one call, linked to what they are rebuilt from."""
    recording, holders = bound.recording, {}
    replays: dict[int, Replay] = {}
    offloads = None if bound.prefetcher is None else bound.prefetcher.register()
    for index in bound.order:
        value = recording.values[index]
        choice = bound.policy.stores[index]
        if choice == RETAIN:
            holders[index] = Retained(value.name)
        elif choice == OFFLOAD:
            holders[index] = Offloaded(value.name, value.geometry, bound.uses[index], offloads)
        elif choice is not None:
            uses = bound.uses[index]
            holders[index] = Compressed(value.name, bound.codecs[index], value.geometry, rows(value), uses)
        else:
            producer = value.producer
            if producer not in replays:
                rerun = bound.replays[producer]
                replays[producer] = Replay(rerun, {i: holders[i] for i in rerun.reads})
            holders[index] = Rebuilt(value.name, replays[producer], value.output)
    return holders


def _buffer(bound: BoundPolicy, source: int) -> torch.Tensor | None:
    owner, name = bound.recording.buffers[source]
    return getattr(owner, name, None)


def _looks_like(tensor: torch.Tensor | None, geometry: Geometry) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.shape == geometry.size
        and tensor.stride() == geometry.stride
        and tensor.dtype is geometry.dtype
    )
