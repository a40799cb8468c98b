"""Follow a call whose program was predicted: the plan holds for it as long as each operator is the predicted one.

A prediction knows a program at a few sizes. What Python decides by a size shows at others only: a branch at a length, a
factor that follows it. So the first call at a predicted size is recorded beside its plan, without verifying anything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ds_adacc.program.arguments import ValueRef
from ds_adacc.program.recorded_op import RecordedOp
from ds_adacc.program.recording import RecordedValue, Recording
from ds_adacc.program.slots import keep, run_packed
from ds_adacc.python_state.places import PythonReads
from ds_adacc.python_watch.collector import uncollected
from ds_adacc.python_watch.watch import Watch
from ds_adacc.record.block_call import BlockCall
from ds_adacc.record.casts import is_autocasts
from ds_adacc.record.compiled_kernels import KERNEL
from ds_adacc.record.executed_call import ExecutedCall
from ds_adacc.record.known_tensors import Unrecordable
from ds_adacc.record.late_slots import LateSlot
from ds_adacc.record.recorder import Recorder


@uncollected()  # Rule R22
def follow(
    predicted: Recording, call: BlockCall, pack: Callable[[torch.Tensor], Any], diverge: Callable[[], None]
) -> tuple[Any, bool, PythonReads | None]:
    """What the call returns, whether it ran the predicted program, and what it has read. What it raises passes through.

    Of what it has read nothing is known (None) where a profiler of Python's calls runs.

    `pack`: the pack hook of the call under its plan. `diverge`: has it retain all that is saved from then on.
    """
    follower = Follower(predicted, call, pack, diverge)
    try:
        is_watched = Watch.refusal() is None
        if is_watched:
            follower.watch.start()
        output = run_packed(follower.pack, functools.partial(follower.run, call))
    finally:
        follower.watch.stop()
        is_as_predicted = follower.close()
    return output, is_as_predicted, follower.watch.reads if is_watched else None


def not_followed_now(predicted: Recording) -> str | None:
    """Why a call of this program cannot be followed now, though perhaps later: there is no watch, and it needs one.

    Only the watch tells of Functions, of kernels in Python, and of those that are launched.
    """
    needs_watch = (op.is_function or op.func is KERNEL or op.python_reads is not None for op in predicted.ops)
    return Watch.refusal() if any(needs_watch) else None


class Follower(Recorder):
    """The dispatch mode and the pack hook of one call. `failure` says from where on it is not as predicted.

    An operator runs before autograd saves what it has made. So whatever was saved before `failure` was set is rebuilt
    by operators that were as predicted; and `pack` calls `diverge` before anything else is saved. What a Function saves
    waits for its end, since it is compared only then.
    """

    sees_lifetimes = False  # those of the recorded call are known, and each operator would take longer

    def __init__(
        self, predicted: Recording, call: BlockCall, pack: Callable[[torch.Tensor], Any], diverge: Callable[[], None]
    ) -> None:
        super().__init__(predicted.name, call)
        self._predicted, self._pack, self._diverge = predicted, pack, diverge
        self._parameters = tuple(predicted.parameters)  # the forward may put others in their place
        self._compared = 0  # how many values
        self._saved = 0  # how many saved tensors were compared
        self._is_closed = False
        self._late: list[tuple[LateSlot, torch.Tensor]] = []  # those that the running Function saves

    @torch._disable_dynamo
    def pack(self, tensor: torch.Tensor) -> Any:
        with self.watch.paused():
            if self.is_elsewhere():
                if not self._is_closed:  # a thread that the block has started may still run after its end
                    self._diverge()
                return keep(tensor)
            super().pack(tensor)
            self.saved.clear()
            if self._running is not None:
                self._late.append((LateSlot(None), tensor))
                return self._late[-1][0]
            self._compare_saved()
            return self._packed(tensor)

    def function_ends(self, result: Any, context: Any, raised: bool) -> None:
        super().function_ends(result, context, raised)
        self._compare_saved()
        late, self._late = self._late, []
        for slot, tensor in late:
            slot.slot = self._packed(tensor)

    def _packed(self, tensor: torch.Tensor) -> Any:
        if self.failure is not None:
            self._diverge()
        with self._noting():
            return self._pack(tensor)

    def close(self) -> bool:
        """Let go of all tensors, as autograd keeps the pack hook. Returns whether the call was as predicted."""
        if self.failure is None and not all(map(is_autocasts, self._found.values())):
            self.failure = "the program keeps a cast that is predicted to be autocast's"
        if self.failure is None and self.watch.sources:
            self.failure = f"it depends on {self.watch.unguarded}"
        if self.failure is not None:
            self._diverge()
        self._is_closed = True
        del self.saved, self.draft, self._casts, self._found, self._made, self._closure
        del self._parameters, self._pack, self._diverge
        return self.failure is None

    def _note(self, ran: ExecutedCall) -> RecordedOp | None:
        op = self.draft.note(ran)
        if op is not None:
            self._compare(op)
            self.draft.known.tensors.release(op.outputs)  # they die as they do without a follower
        return op

    def _compare_saved(self) -> None:
        """Set `failure` if autograd saves another tensor than predicted, though it looks the same."""
        if self.failure is not None:
            return
        mine = [position.ref for position in self.draft.positions[self._saved :]]
        its = [position.ref for position in self._predicted.positions[self._saved :]]
        if mine != its[: len(mine)]:
            self.failure = "another tensor is saved than predicted"
        self._saved += len(mine)
        self.draft.known.tensors.release(ref.index for ref in mine if isinstance(ref, ValueRef))  # the plan holds it

    def _compare(self, op: RecordedOp) -> None:
        """Raises Unrecordable if the operator, what it reads or what it makes is not as predicted."""
        known, predicted = self.draft.known, self._predicted
        if op.index >= len(predicted.ops) or _call(op) != _call(predicted.ops[op.index]):
            raise Unrecordable(f"{op.name} is not predicted")
        # Rule R21
        new_places = _places(op) - _places(predicted.ops[op.index])
        if new_places:
            raise Unrecordable(f"{op.name} reads {min(new_places)}, which it did not where it was recorded")
        if self.watch.sources:
            raise Unrecordable(f"{op.name} may depend on {self.watch.unguarded}")
        if op.refusal is not None and predicted.ops[op.index].refusal is None:
            raise Unrecordable(f"{op.name} must not be replayed here: {op.refusal}")
        new = known.values[self._compared :]
        if list(map(_looks, new)) != list(map(_looks, predicted.values[self._compared : len(known.values)])):
            raise Unrecordable(f"{op.name} reads or makes other tensors than predicted")
        self._compared = len(known.values)
        parameters = zip(known.parameters, self._parameters, strict=False)
        if known.buffers != list(predicted.buffers[: len(known.buffers)]) or any(a is not b for a, b in parameters):
            raise Unrecordable(f"{op.name} reads other parameters or buffers than predicted")


def _places(op: RecordedOp) -> frozenset[str]:
    """What the operator's kernel was seen to read besides its arguments."""
    return frozenset() if op.python_reads is None else frozenset(op.python_reads.places)


def _call(op: RecordedOp) -> tuple[Any, ...]:
    """What is called with which arguments. As text, NaN is equal to itself, and 0.0 is not to -0.0."""
    return op.func, repr((op.args, op.kwargs)), op.outputs, op.written


def _looks(value: RecordedValue) -> tuple[Any, ...]:
    return value.index, value.origin, value.source, value.producer, value.output, value.geometry
