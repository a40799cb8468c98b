"""The first call of a block: run it under the recorder, find its values' roles and labels, verify its operators."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._dynamo  # the hooks load it; loaded within a forward, it keeps the frames of its callers alive
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ds_adacc.program.arguments import ValueRef, tensors_in
from ds_adacc.program.geometry import storage_of
from ds_adacc.program.nodes import graphs_behind
from ds_adacc.program.recording import Recording
from ds_adacc.program.slots import Slot, keep, on_one_stream, run_packed
from ds_adacc.python_state.closure import Closure
from ds_adacc.python_state.guards import python_modules_in, snapshot
from ds_adacc.python_watch.collector import uncollected
from ds_adacc.python_watch.watch import Watch
from ds_adacc.record.block_call import BlockCall
from ds_adacc.record.known_tensors import Unrecordable
from ds_adacc.record.late_slots import LateSlot, LateSlots
from ds_adacc.record.naming.roles import assign_roles
from ds_adacc.record.recorder import Recorder
from ds_adacc.record.replayable.late_refusals import extra_refusals, without_inaccessible
from ds_adacc.record.tensors import RecordedTensors


@dataclass
class Capture:
    """A recorded call.

    `output`: what the block returned. `inputs`: the tensors it was given, still in the autograd graph. `recording`: its
    program, or None, and then `reason` says why there is none. `tensors`: the recorded values, by index. `saved` and
    `slots`: what autograd saved, in order, and the slots that it holds instead; what it has discarded since, or what is
    gone for a while (`without`), is an empty tensor. `watch`: what Python was seen to read. `cached`: of each cast that
    autocast keeps, a function that returns None once it does no more.
    """

    output: Any
    inputs: Sequence[torch.Tensor]
    recording: Recording | None
    reason: str
    tensors: RecordedTensors
    saved: list[torch.Tensor]
    slots: Sequence[LateSlot]
    watch: Watch
    cached: Sequence[Callable[[], object]]

    @property
    def noted(self) -> dict[int, torch.Tensor]:
        """By value, the buffers that the block has read, and the states of random generators that a replay needs.

        Meanwhile the block may have put other buffers in their place.
        """
        assert self.recording is not None
        buffers = (value.index for value in self.recording.values if value.origin == "buffer")
        states = (ref.index for draw in self.recording.draws for ref in (draw.before, draw.after))
        return {index: self.tensors[index] for index in (*buffers, *states)}

    def hand_over(self, pack: Callable[[torch.Tensor], Any]) -> None:
        """Give every saved tensor to the plan's pack hook, and release what that hook does not keep."""
        for slot, tensor in zip(self.slots, self.saved, strict=True):
            slot.slot = pack(tensor)
        self.inputs, self.tensors, self.saved, self.slots = (), RecordedTensors(), [], ()

    @contextmanager
    def without(self, indices: Collection[int]) -> Iterator[None]:
        """Let these values die, to make room for something else. Afterwards those that were saved are held again.

        All of them must be rebuildable. What the block has returned stays, and so do the values in its memory: the
        program may write to it, which the tensors saved of it must notice.
        """
        assert self.recording is not None
        storages = {storage_of(tensor) for tensor in tensors_in(self.output)}
        alive = {index: self.tensors.at_hand(index) for index in indices}
        gone = [index for index, tensor in alive.items() if tensor is None or storage_of(tensor) not in storages]
        del alive
        saved = ((n, p.ref) for n, p in enumerate(self.recording.positions) if p.value in gone)
        again = {number: ref for number, ref in saved if isinstance(ref, ValueRef)}
        self.tensors.drop(gone)
        for number in again:
            self.saved[number], self.slots[number].slot = torch.empty(0), None
        yield
        for number, ref in again.items():
            tensor = ref.geometry.view(self.tensors.hold(ref.index))
            self.saved[number], self.slots[number].slot = tensor, keep(tensor)


class _RecordingHook:
    """The pack hook. Autograd keeps it as long as any slot, so `close` lets go of the recorder and its tensors."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder: Recorder | None = recorder
        self._slots = LateSlots(recorder.draft.ops)
        self._keep = on_one_stream(self._slots.keep)

    @torch._disable_dynamo
    def __call__(self, tensor: torch.Tensor) -> Slot:
        if self.recorder is None:  # a thread that the block has started runs after its end
            return keep(tensor)
        with self.recorder.watch.paused():
            if self.recorder.is_elsewhere():
                return keep(tensor)
            packed = self.recorder.pack(tensor)
            with self.recorder.aside():
                return self._keep(packed)

    def close(self) -> tuple[list[LateSlot], Mapping[int, int]]:
        """As of `LateSlots`."""
        self.recorder, self._keep = None, keep
        return self._slots.close()


_OF_TORCH_FUNC = "don't yet support saved tensor hooks"  # in torch's own message


def not_recorded_now(closure: Closure) -> str | None:
    """Why a block cannot be recorded in this call, though perhaps in a later one."""
    if any(is_lazy(parameter) for parameter in closure.parameters):
        return "a lazy module in it has no parameters yet"
    if any(isinstance(parameter, DTensor) for parameter in closure.parameters):
        return "its parameters are of type DTensor, as fully_shard (FSDP2) and parallelize_module make them"
    return Watch.refusal()


@uncollected()  # Rule R22
def capture(name: str, call: BlockCall) -> Capture:
    """Run the block once, as plain autograd would, and record it. What the block raises passes through (Rule R1).

    Raises RuntimeError if the block differentiates in a way that torch allows under no hooks of saved tensors.
    """
    recorder = Recorder(name, call)
    hook, watch = _RecordingHook(recorder), recorder.watch
    began = torch.autograd._get_sequence_nr()
    try:
        watch.start()  # here, as it is undone then even if an interrupt comes at once
        output = run_packed(hook, functools.partial(recorder.run, call))
    except RuntimeError as error:
        if not _disables_hooks(error):
            raise
        what = f"torch.autograd.graph.disable_saved_tensors_hooks({str(error)!r})"
        if _OF_TORCH_FUNC in str(error):
            what = "torch.func.grad, vjp, jacrev or hessian"
        text = (
            f"block {name} calls {what}, which torch does not run where a checkpointing has its hooks: list other "
            'classes in "blocks" of the adacc section, or disable it'
        )
        raise RuntimeError(text) from error
    finally:
        watch.stop()
        slots, discarded = hook.close()
    # The Python modules of the user's that the block holds or is given, or that it reads somewhere else.
    watch.note_held(python_modules_in((call.closure.marks(), snapshot(call.arguments), watch.reads.marks)))
    recording, reason = None, ""
    try:  # Rule R13: the output is good, whether there is a recording or not
        recording = _sound(recorder.recording(discarded, call.arguments))
        recording = replace(recording, backward=recorder.draft.nodes.graph(output, began))
        recording = without_inaccessible(_found_again(recording, output, began))
        parameters = tuple(recording.parameters)  # kept alive: the forward may have put others in their place
        recorder.draft.known.tensors.rebuild_from(recording.values, recording.ops, parameters)
        recording = recorder.draft.labels.give(assign_roles(recording, recorder.draft.known.tensors))
    except Unrecordable as failure:
        reason = str(failure)
    saved, recorder.saved = recorder.saved, []
    if recording is not None:
        pairs = zip(recording.positions, saved, strict=True)
        saved = [torch.empty(0) if position.discarded else tensor for position, tensor in pairs]
    tensors = recorder.draft.known.tensors
    return Capture(output, call.inputs, recording, reason, tensors, saved, slots, watch, recorder.cached)


def _disables_hooks(error: RuntimeError) -> bool:
    """Whether it comes of a context that allows no hooks for saved tensors."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_code is inspect.unwrap(disable_saved_tensors_hooks).__code__


def _found_again(recording: Recording, output: Any, began: int) -> Recording:
    """What compiled code runs is run again only where each call can tell which graphs it has run (Rule R17)."""
    if not recording.runs_compiled or graphs_behind(output, began) == recording.graphs:
        return recording
    reason = "backward of the block's output does not lead to all of its compiled graphs, or leads to others"
    reasons = extra_refusals(recording, recording.compiled_from, ()) | {op.index: reason for op in recording.graph_ops}
    return replace(recording.refuse(reasons), loses_graphs=True)


def _sound(recording: Recording) -> Recording:
    for index in sorted(recording.saved):
        if recording.values[index].overwritten:  # Rule R4: what backward needs is gone
            raise Unrecordable(f"it saves {recording.values[index].name} for backward and then writes to it in place")
    return recording
