"""The state of one call of a block: its holders, which the pack hook fills position by position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ds_adacc.execute.bound_policy import BoundPolicy, Instruction, rows
from ds_adacc.execute.holders import Compressed, Holder, Offloaded, Rebuilt, Replay, Retained
from ds_adacc.planner import OFFLOAD, RETAIN
from ds_adacc.record.geometry import Geometry, span
from ds_adacc.record.saved import ParameterSlot, Slot, ValueSlot, keep


class Call:
    """The pack hook of one call, and all its state. After the forward only the slots keep the holders that they need.

    Rule 3: the first time, a value is known only by its position and its looks. That suffices: whatever decides a
    block's course is guarded, and the recorder lets nothing be rebuilt that is first saved after Python reads data.

    Rule 4: where a tensor does not look as recorded (a mixture of experts routes otherwise, say), this call diverges:
    it and all that follow are retained.
    """

    __slots__ = ("_noted", "_on_divergence", "_position", "_seen", "bound", "diverged", "holders")

    def __init__(
        self,
        bound: BoundPolicy,
        inputs: Sequence[torch.Tensor],
        on_divergence: Callable[[BoundPolicy, int], None] | None = None,
        noted: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        """`on_divergence` is told the bound policy and the number of the first saved tensor that is not as recorded.

        `noted`: by value, the states that random generators had in the forward, for a call whose tensors are packed
        after its forward. None: they are read off the generators.
        """
        self._on_divergence = on_divergence
        self.bound = bound
        self.holders = _open(bound)
        self._noted = noted
        self._position = 0
        self._seen: dict[int, tuple[int, StorageWeakRef | None]] = {}
        self.diverged = False
        # Inputs and buffers are saved now: autograd may never pack them, and yet a rebuilt value may need them.
        for index in bound.inputs:
            value = bound.recording.values[index]
            if value.origin == "input":
                tensor = inputs[value.source]
            else:
                tensor = _buffer(bound, value.source)
                if not _looks_like(tensor, value.geometry):
                    self._diverge()
                    return
            self._seen[index] = tensor.data_ptr(), None  # the caller keeps it alive through the forward
            self.holders[index].fill(tensor.detach())
        if not self._note(bound.first_states):
            self._diverge()

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
        if instruction.states and not self._note(instruction.states):
            self._diverge()
            return self._keep(tensor)
        if instruction.value is not None:
            slot: Slot = self._save(instruction, tensor)
        elif instruction.parameter is not None:
            slot = ParameterSlot(self.bound.recording.parameters[instruction.parameter], instruction.view)
        else:
            slot = self._keep(tensor)
        for index in instruction.release:
            self.holders[index].pending = None  # Rule 4: all its sources are saved now
        return slot

    @property
    def next_instruction(self) -> Instruction | None:
        """What the plan expects next; None if the call has diverged, or the plan expects no more."""
        instructions = self.bound.instructions
        return None if self.diverged or self._position >= len(instructions) else instructions[self._position]

    def close(self) -> None:
        """Let go of the holders at the end of the forward (Rule 5)."""
        self.holders = {}

    def _note(self, states: Sequence[tuple[int, torch.Generator]]) -> bool:
        """Hold the states of random generators (Rule 14). False if they cannot be known."""
        for index, generator in states:
            if self._noted is not None:
                state = self._noted[index]
            elif generator.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return False  # each replay of the graph starts from another state
            else:
                state = generator.get_state()
            self.holders[index].fill(state)
        return True

    def _is_expected(self, instruction: Instruction, tensor: torch.Tensor) -> bool:
        if instruction.dtype is None:
            return True  # nothing is planned for this position
        if (
            tensor.shape != instruction.size
            or tensor.stride() != instruction.stride
            or tensor.dtype is not instruction.dtype
        ):
            return False
        if instruction.parameter is not None:
            parameter = self.bound.recording.parameters[instruction.parameter]
            return tensor.data_ptr() == parameter.data_ptr() + instruction.start
        if instruction.is_first:
            return instruction.fits(tensor)
        address, storage = self._seen[instruction.value]
        return tensor.data_ptr() == address + instruction.start and (storage is None or not storage.expired())

    def _save(self, instruction: Instruction, tensor: torch.Tensor) -> ValueSlot:
        holder = self.holders[instruction.value]
        if instruction.again:  # the storage too: freed in between, its address may belong to another tensor
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
        """A slot for a tensor that the plan does not know. Rule 8: that of a parameter must not hold it."""
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
    """Empty holders for one call, each linked to those that it is rebuilt from (Rules 5 and 10)."""
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
    return getattr(owner(), name, None)


def _looks_like(tensor: torch.Tensor | None, geometry: Geometry) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.shape == geometry.size
        and tensor.stride() == geometry.stride
        and tensor.dtype is geometry.dtype
    )
