"""Count what the calls of blocks hold between forward and backward in an observed step, and note their order."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ds_adacc import planner
from ds_adacc.execute.alive_calls import AliveCall
from ds_adacc.execute.block import Block
from ds_adacc.execute.call import PackedCall
from ds_adacc.execute.variant import Variant
from ds_adacc.observe.step_profiler import CallMoments, Measured, StepProfiler
from ds_adacc.plan.forward_order import ForwardPass
from ds_adacc.program.arguments import tensors_in
from ds_adacc.program.slots import UNPLANNED, Holder, NotifyingSlot, Retained, Slot


class Observer:
    """Notes for one step: the order of the calls, and the bytes held when backward begins.

    `held_bytes` and `held_calls` (by block type and policy) are counted when backward begins. Before that they are
    None and empty. With a `profiler`, `measured` holds the measurements of the first forward and backward.
    """

    def __init__(self, profiler: StepProfiler | None = None) -> None:
        self.measured: list[Measured] = []
        self._profiler = profiler
        self.held_bytes: int | None = None
        self.held_calls: Counter[tuple[str, planner.Policy]] = Counter()
        self._alive: weakref.WeakSet[ObservedCall] = weakref.WeakSet()  # of the calls that are alive
        self._holders: weakref.WeakSet[Holder] = weakref.WeakSet()
        self._begin_pass()

    def begin(
        self, variant: Variant, block: Block, call: AliveCall, times_forward: bool, times_backward: bool
    ) -> ObservedCall:
        """Note that a call begins. This must come before it stores its inputs: those bytes are the call's own.

        `call`: what each of its slots is to hold. `times_forward`, `times_backward`: as of `CallMoments`.
        """
        assert variant.policy is not None  # it has been admitted
        observed = ObservedCall(self, variant.digest, variant.policy, call)
        self._alive.add(observed)
        if not self._backward:
            observed.number = len(self._forward)
            self._forward.append((variant.digest, block))
        elif len(self._backward) < len(self._forward):
            self._interleaved = True
        if self._profiler is not None:
            observed.moments = self._profiler.forward_begins(
                variant.digest, variant.policy, times_forward, times_backward
            )
        return observed

    def watch(
        self,
        observed: ObservedCall,
        call: PackedCall,
        inputs: Sequence[torch.Tensor],
        pack: Callable[[torch.Tensor], Slot],
    ) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], None]]:
        """A wrapper of the pack hook of `call` that notifies this observer, and what to call with the output.

        `inputs`: the tensors among the block's arguments.
        """
        profiler, nodes = self._profiler, []
        if profiler is not None and observed.moments is not None:
            given = (value for value in call.bound.recording.inputs if value.requires_grad)
            observed.moments.input_gradients = tuple(value.geometry.nbytes for value in given)
            nodes = profiler.note_end(observed.moments, inputs)

        def watched(tensor: torch.Tensor) -> NotifyingSlot:
            slot = pack(tensor)
            if isinstance(slot, Retained) and slot.name == UNPLANNED:
                self._holders.add(slot)
            return NotifyingSlot(slot, observed.begin_backward)

        def done(output: Any) -> None:
            nodes.clear()  # the graph keeps them now
            values = call.bound.recording.values
            # Inputs that other calls hold are added too: each storage counts once.
            counting = (i for i in call.holders if values[i].owned or values[i].may_be_shared)
            self._holders.update(map(call.holders.__getitem__, counting))
            if profiler is not None and observed.moments is not None:
                observed.moments.ended = profiler.now()
                profiler.note_gradients(call.bound.recording.parameters)
                _watch_backward(weakref.ref(observed), output)

        return watched, done

    def end_pass(self) -> ForwardPass:
        """End a forward and its backward, and return what was observed of them."""
        if self._profiler is not None and self._forward and (measured := self._profiler.stop()) is not None:
            self.measured, self._profiler = measured, None
        in_reverse = self._backward == list(reversed(range(len(self._forward))))
        seen = ForwardPass(tuple(self._forward), in_reverse and not self._interleaved)
        self._begin_pass()
        return seen

    @property
    def is_measuring(self) -> bool:
        """Whether a forward and backward is still to be measured."""
        return self._profiler is not None

    def drop_pass(self) -> None:
        """Discard what was observed of a forward: no backward has followed it, or a call has failed."""
        self._begin_pass()
        if self._profiler is not None:
            self._profiler.restart()

    def backward_begins(self, observed: ObservedCall) -> None:
        """Note that a call's backward begins. At the first, count the bytes that holders hold, each storage once."""
        if observed.number is not None:
            self._backward.append(observed.number)
        if self._profiler is not None and observed.moments is not None:
            observed.moments.backward = self._profiler.now()
            self._profiler.note_kept()
        if self.held_bytes is None:
            storages: dict[int, int] = {}
            for holder in self._holders:
                for tensor in holder.held():
                    storage = tensor.untyped_storage()
                    storages[storage._cdata] = storage.nbytes()
            self.held_bytes = sum(storages.values())
            self.held_calls = Counter((each.digest, each.policy) for each in self._alive)

    def close(self) -> None:
        """Discard the current measurement and the profiler."""
        if self._profiler is not None and self._profiler.close():
            self._profiler = None

    def _begin_pass(self) -> None:
        self._forward: list[tuple[str, Block]] = []
        self._backward: list[int] = []
        self._interleaved = False


class ObservedCall:
    """Lives as long as any slot of one call.

    `number` is the position of the call in the forward; None if backward had begun before the call.
    """

    __slots__ = ("__weakref__", "call", "digest", "has_begun", "moments", "number", "observer", "policy")

    def __init__(self, observer: Observer, digest: str, policy: planner.Policy, call: AliveCall) -> None:
        self.observer = observer
        self.digest = digest
        self.policy = policy
        self.call = call
        self.number: int | None = None
        self.has_begun = False
        self.moments: CallMoments | None = None

    def begin_backward(self) -> None:
        if not self.has_begun:
            self.has_begun = True
            self.call.note_backward()
            self.observer.backward_begins(self)


def _watch_backward(observed: weakref.ref[ObservedCall], output: Any) -> None:
    """Have the observed call told when backward comes to the output. It may allocate before it unpacks anything.

    The graph must not keep the observed call: that lives as long as the call's slots.
    """

    def begin(_: tuple[torch.Tensor | None, ...]) -> None:
        known = observed()
        if known is not None:
            known.begin_backward()

    for node in {node for tensor in tensors_in(output) if (node := tensor.grad_fn) is not None}:
        node.register_prehook(begin)
