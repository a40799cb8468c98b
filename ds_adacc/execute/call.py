"""The state of one call of a block: its holders, which the pack hook fills position by position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ds_adacc.execute.alive_calls import AliveCall
from ds_adacc.execute.bound_policy import BoundPolicy
from ds_adacc.execute.course import Instruction
from ds_adacc.execute.holders import Recomputed, Replay, Retained
from ds_adacc.execute.host_offload import Offloads
from ds_adacc.program.dispatch_modes import modes_now
from ds_adacc.program.geometry import Geometry, span
from ds_adacc.program.nodes import graphs_behind
from ds_adacc.program.slots import CopyingSlot, Holder, NotifyingSlot, ParameterSlot, Slot, ValueSlot, keep
from ds_adacc.python_state.tensor_marks import stride_of


class PackedCall(Protocol):
    """One call that packs what its forward saves: a `Call`, or a `WholeCall` of a block recomputed as a whole.

    `holders`: by value, what it holds. `diverged`: it has left the recorded course, and retains all from there on.
    `alive`: what autograd is to hold as long as it holds the call.
    """

    bound: BoundPolicy
    holders: dict[int, Holder]
    diverged: bool

    @property
    def alive(self) -> AliveCall | None: ...

    def pack(self, tensor: torch.Tensor) -> Slot:
        """The pack hook: for each saved tensor once, in the recorded order (Rule E12)."""
        ...

    def diverge(self) -> None:
        """Retain all that is saved from now on."""

    def confirm(self, output: Any) -> set[type] | None:
        """The forward has ended. Returns the recorded compiled graphs that did not run; None: all did (Rule R17)."""

    def release(self) -> None:
        """Let go of what is kept until it is known which compiled graphs have run."""

    def close(self) -> None:
        """Let go of everything at the end of the forward (Rule E5)."""


class Call:
    """The pack hook of one call, and all its state. After the forward only the slots keep the holders that they need.

    Rule E3: the first time, a value is known only by its position and its looks. That suffices: whatever decides a
    block's course is guarded, and the recorder lets nothing be rebuilt that is first saved after Python reads data.

    Rule E4: where a tensor does not look as recorded (a mixture of experts routes otherwise, say), this call diverges:
    it and all that follow are retained.
    """

    __slots__ = (
        *("_first_node", "_noted", "_offloads", "_on_divergence", "_parameters", "_position", "_seen"),
        *("alive", "bound", "diverged", "holders"),
    )

    def __init__(
        self,
        bound: BoundPolicy,
        inputs: Sequence[torch.Tensor],
        on_divergence: Callable[[BoundPolicy, int], None] | None = None,
        noted: Mapping[int, torch.Tensor] | None = None,
        alive: AliveCall | None = None,
    ) -> None:
        """`on_divergence` is told the bound policy and the number of the first saved tensor that is not as recorded.

        `noted`: by value, the buffers before the forward, and the states that random generators had in it, for a call
        whose tensors are packed after its forward. None: the buffers and the generators have them now. `alive`: what
        autograd is to hold as long as it holds the call, if anybody counts.
        """
        self._on_divergence = on_divergence
        self.bound = bound
        self._parameters = tuple(bound.recording.parameters)  # Rule E13: the forward may put others in their place
        self._offloads = None if bound.prefetcher is None else bound.prefetcher.register()
        self.holders = _empty_holders(bound, self._offloads)
        self._noted = noted
        self._position = 0
        self._first_node = torch.autograd._get_sequence_nr()  # of those that autograd makes in the forward
        self._seen: dict[int, tuple[int, StorageWeakRef | None]] = {}
        self.diverged = False
        self.alive = alive
        # Inputs and buffers are saved now: autograd may never pack them, and yet a rebuilt value may need them.
        for index, taken in bound.course.inputs:
            value = bound.recording.values[index]
            if value.origin == "input":
                tensor = inputs[value.source]
            else:
                tensor = bound.recording.buffer(value) if noted is None else noted.get(index)
                if not _looks_like(tensor, value.geometry):
                    self.diverge()
                    return
            self._seen[index] = tensor.data_ptr(), None  # the caller keeps it alive through the forward
            tensor = tensor.detach()
            holder = self.holders[index]
            fill = holder.hold if index in bound.course.until_confirmed else holder.fill
            fill(tensor if taken is None else taken.view(tensor))
        if not self._note_states(bound.course.first_states):
            self.diverge()

    def pack(self, tensor: torch.Tensor) -> Slot:
        """The pack hook: for each saved tensor once, in the recorded order (Rule E12)."""
        # This runs for every saved tensor (Rule E2), so what it looks up, it looks up once.
        number = self._position
        self._position = number + 1
        instructions = self.bound.course.instructions
        if self.diverged:
            return self._keep(tensor)
        if number >= len(instructions):
            return self._diverging(tensor)
        instruction = instructions[number]
        slot: Slot | None = None
        if instruction.discarded:
            slot = self._discarded(instruction, tensor)
        elif instruction.dtype is None:
            slot = self._keep(tensor)  # nothing is planned for this position
        elif (
            tensor.dtype is instruction.dtype
            and tensor.shape == instruction.size
            and stride_of(tensor) == instruction.stride
        ):
            if (value := instruction.value) is not None:
                slot = self._save(value, instruction, tensor)
            elif (ref := instruction.parameter) is not None:
                parameter = self._parameters[ref.index]
                if tensor.data_ptr() == parameter.data_ptr() + instruction.start:
                    slot = ParameterSlot(parameter, ref.geometry)
        if slot is None or (instruction.states and not self._note_states(instruction.states)):
            return self._diverging(tensor)
        if instruction.copy:
            slot = CopyingSlot(slot)
        for index in instruction.release:
            self.holders[index].release()  # Rule E4: all its sources are saved now
        if self._offloads is not None and number == self.bound.course.last and instruction.dtype is not None:
            # Backward asks for it first. Then all that the call has offloaded starts to come back.
            slot = NotifyingSlot(slot, self._offloads.expect)
        if number == self.bound.course.first and self.alive is not None:  # backward asks for it last
            return NotifyingSlot(slot, self.alive.note_backward)
        return slot

    @property
    def next_instruction(self) -> Instruction | None:
        """What the plan expects next; None if the call has diverged, or the plan expects no more."""
        instructions = self.bound.course.instructions
        return None if self.diverged or self._position >= len(instructions) else instructions[self._position]

    def confirm(self, output: Any) -> set[type] | None:
        """Let go of what is kept until the forward has ended, if it has run the recorded compiled graphs (Rule R17).

        If it has run others, or given them other numbers, or has not saved all tensors, then all stays, and the call
        diverges. Returns None if the recorded graphs ran. If not, returns those of them that did not run: none, if only
        the numbers differed.
        """
        recording = self.bound.recording
        if not recording.runs_compiled:
            return None
        ran = recording.graphs if recording.loses_graphs else graphs_behind(output, self._first_node)
        if ran != recording.graphs:
            self.diverged = True
            return {run.cls for run in recording.graphs}.difference(run.cls for run in ran)
        if self._position < len(self.bound.course.instructions):
            self.diverge()
        if not self.diverged:
            self.release()
        return None

    def release(self) -> None:
        """Let go of what is kept until it is known which compiled graphs have run."""
        for index in self.bound.course.until_confirmed:
            self.holders[index].release()

    def close(self) -> None:
        """Let go of the holders and the parameters at the end of the forward (Rule E5)."""
        self.holders, self._offloads, self._parameters = {}, None, ()

    def _note_states(self, states: Sequence[tuple[int, torch.Generator]]) -> bool:
        """Hold the states of random generators (Rule E14). False if they cannot be known."""
        for index, generator in states:
            if self._noted is not None:
                state = self._noted[index]
            elif generator.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return False  # each replay of the graph starts from another state
            else:
                state = generator.get_state()
            self.holders[index].fill(state)
        return True

    def _save(self, value: int, instruction: Instruction, tensor: torch.Tensor) -> Slot | None:
        """A slot for a tensor that looks as recorded; None if it is not (a part of) the value all the same."""
        first = instruction.first
        holder = self.holders[value]
        if first is None:
            address, storage = self._seen[value]
            if tensor.data_ptr() != address + instruction.start or (storage is not None and storage.expired()):
                return None
            return holder if instruction.view is None else ValueSlot(holder, instruction.view)
        if first.is_part and not first.fits(tensor):
            return None
        if first.again:  # the storage too: freed in between, its address may belong to another tensor
            weak = None if type(holder) is Retained else StorageWeakRef(tensor.untyped_storage())
            self._seen[value] = tensor.data_ptr() - instruction.start, weak
        if first.fill or first.hold:
            if first.detaches:
                tensor = tensor.detach()  # it may be part of the autograd graph
            if first.taken is not None:
                tensor = first.taken.view(tensor)
            (holder.fill if first.fill else holder.hold)(tensor)
        return holder if instruction.view is None else ValueSlot(holder, instruction.view)

    def _discarded(self, instruction: Instruction, tensor: torch.Tensor) -> Slot:
        """A slot for a tensor that autograd discards, as in the recorded call. If it does not, the tensor is retained.

        As the recording tells which parameter it is (part of), no other is looked at.
        """
        ref = instruction.parameter
        return self._keep(tensor, () if ref is None else (self._parameters[ref.index],))

    def _diverging(self, tensor: torch.Tensor) -> Slot:
        self.diverge()
        return self._keep(tensor)

    def _keep(self, tensor: torch.Tensor, parameters: Sequence[torch.Tensor] | None = None) -> Slot:
        """A slot for a tensor that the plan does not know. Rule E8: that of a parameter must not hold it.

        `parameters`: those that it may be (part of); None: all of the block.
        """
        if tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg()):
            start, stop = span(tensor)
            for parameter in self._parameters if parameters is None else parameters:
                low, high = span(parameter)
                if low <= start < stop <= high:
                    return ParameterSlot(parameter, Geometry.of(tensor, low))
        return keep(tensor)

    def diverge(self) -> None:
        """Retain all that is saved from now on."""
        if self.diverged:
            return
        self.diverged = True
        if self._on_divergence is not None:
            self._on_divergence(self.bound, self._position)


def _empty_holders(bound: BoundPolicy, offloads: Offloads | None) -> dict[int, Holder]:
    """Empty holders for one call, each linked to those that it is rebuilt from (Rules E5 and E10)."""
    replays: dict[int, Replay] = {}
    modes = modes_now()
    holders: dict[int, Holder] = {index: kind(facts) for index, kind, facts in bound.stored}
    if offloads is not None:
        holders.update((index, kind(facts, offloads)) for index, kind, facts in bound.offloaded)
    for index, name, producer, output in bound.rebuilt:
        replay = replays.get(producer)
        if replay is None:
            segment = bound.segments[producer]
            replay = replays[producer] = Replay(segment, {i: holders[i] for i in segment.reads}, modes)
        holders[index] = Recomputed(name, replay, output)
    return holders


def _looks_like(tensor: torch.Tensor | None, geometry: Geometry) -> TypeGuard[torch.Tensor]:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.shape == geometry.size
        and stride_of(tensor) == geometry.stride
        and tensor.dtype is geometry.dtype
    )
