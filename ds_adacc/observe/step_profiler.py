"""Measure the bytes and seconds of the blocks' calls in one forward and backward of a real step."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import Node, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from ds_adacc import planner
from ds_adacc.profile.memory_trace import MemoryTrace
from ds_adacc.program.parameters import is_released


@dataclass(frozen=True)
class Moment:
    """A point in time: by the host's clock in seconds, and as a mark in the trace of memory (0: nothing is traced).

    On a CUDA device also as an event of its current stream.
    """

    host: float
    mark: int
    event: torch.cuda.Event | None = None


@dataclass
class CallMoments:
    """When the forward of a call began and ended, and when its backward began and, as far as it shows, ended.

    `input_gradients`: bytes of the gradient of each of the block's inputs that gets one: what its backward leaves.
    `times_forward`, `times_backward`: whether they do nothing but run the plan, so that their seconds are the plan's.
    `was_recorded`: its forward was recorded, and had ended before what it saves was packed.
    """

    digest: str
    policy: planner.Policy
    began: Moment
    ended: Moment | None = None
    backward: Moment | None = None
    finished: Moment | None = None
    input_gradients: tuple[int, ...] = ()
    times_forward: bool = True
    times_backward: bool = True
    was_recorded: bool = False


@dataclass(frozen=True)
class Measured:
    """One call of a block of this type, under this policy.

    `forward_growth` is the most bytes alive during forward, less those alive when it began. `backward_growth` is the
    same for backward, without what outlives it other than the gradients of the block's inputs: DeepSpeed takes its
    buckets when the first gradient comes. Nor is a gradient counted from when it becomes the `.grad` of a parameter,
    since from then on it is no activation.
    `forward_seconds` and `backward_seconds` are the durations. None: unknown, or with more in them than running the
    plan. A backward is unknown if nothing shows its end: no other call of a block comes after it, and none of the
    block's inputs gets a gradient.
    """

    digest: str
    policy: planner.Policy
    forward_growth: int | None
    backward_growth: int | None
    forward_seconds: float | None
    backward_seconds: float | None


class StepProfiler:
    """Measures memory and time from the first call's forward to the end of backward.

    A trace must begin and stop on one thread, and both outside of any backward. So it begins only on the thread that
    made this object, which is the one that ends the step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread = threading.get_ident()
        self._trace: MemoryTrace | None = None
        self._calls: list[CallMoments] = []
        self._hooks: list[RemovableHandle] = []
        self._awaited: set[int] = set()  # the parameters with a hook of `note_gradients`, by `id`
        self._arrived: list[tuple[int, int, StorageWeakRef]] = []  # their gradients: a mark, the bytes, the memory
        self._is_closed = False

    def forward_begins(
        self, digest: str, policy: planner.Policy, times_forward: bool, times_backward: bool
    ) -> CallMoments | None:
        """Note that a call's forward begins. None if it is not measured: after `close`, or on another thread."""
        if self._is_closed or threading.get_ident() != self._thread:
            return None
        if self._trace is None:
            self._trace = MemoryTrace(self._device)
            self._trace.start()
        moments = CallMoments(digest, policy, self.now(), times_forward=times_forward, times_backward=times_backward)
        self._calls.append(moments)
        return moments

    def note_end(self, moments: CallMoments, inputs: Sequence[torch.Tensor]) -> list[Node]:
        """Have the end of the call's backward noted: backward has come to what made one of the block's `inputs`.

        If an operator made it, the first such moment counts. Autograd runs later nodes first, so by then all nodes of
        the block have run. Otherwise the inputs are leaves, and the last moment counts: the node that adds up a leaf's
        gradient runs as soon as it can, while nodes of the block may be left. A parameter that ZeRO-3 has partitioned
        is left out: its node, made here, would expect a gradient as small as what is left of it.

        Returns the nodes. The caller must keep them until the forward has run, since nothing else keeps that of a leaf
        before. It must not keep them longer. A node may keep the graph alive, and the graph this object, which would
        go on measuring after a failed step.
        """
        required = [tensor for tensor in inputs if tensor.requires_grad and not is_released(tensor)]
        made = [tensor for tensor in required if not tensor.is_leaf]
        is_first, profiler = bool(made), weakref.ref(self)  # the graph must keep neither this object nor a tensor

        def end(_: tuple[torch.Tensor | None, ...]) -> None:
            known = profiler()
            if known is not None and moments.backward is not None and not (is_first and moments.finished is not None):
                moments.finished = known.now()
                known.note_kept()

        nodes = list({get_gradient_edge(tensor).node for tensor in made or required})
        self._hooks += [node.register_prehook(end) for node in nodes]
        return nodes

    def note_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Have it noted when the gradients of these parameters arrive, which may become their `.grad`.

        The forward that uses them has run. Before, their nodes would be made here, and expect gradients as small as
        what ZeRO-3 has left of a parameter that is gathered within the call.
        """
        profiler = weakref.ref(self)

        def arrive(gradients: tuple[torch.Tensor | None, ...]) -> None:
            known, (gradient,) = profiler(), gradients
            if known is None or known._trace is None:
                return
            if type(gradient) is torch.Tensor and gradient.layout is torch.strided:
                memory = gradient.untyped_storage()
                known._arrived.append((known._trace.mark(), memory.nbytes(), StorageWeakRef(memory)))

        for parameter in parameters:
            may_stay = parameter.requires_grad and parameter.is_leaf and parameter.grad is None
            if may_stay and id(parameter) not in self._awaited:
                self._awaited.add(id(parameter))
                self._hooks.append(get_gradient_edge(parameter).node.register_prehook(arrive))

    def note_kept(self) -> None:
        """Tell the trace which gradients have become the `.grad` of a parameter: all that are left by now."""
        arrived, self._arrived = self._arrived, []
        for mark, nbytes, memory in arrived:
            if self._trace is not None and not memory.expired():
                self._trace.keep(mark, nbytes)

    def restart(self) -> None:
        """Discard the measurements, because no backward followed the forward."""
        self._calls = []
        self._remove_hooks()
        if self._trace is not None and self._trace.stop():
            self._trace = None

    def close(self) -> bool:
        """Measure nothing any more. False if the trace runs on, inside a backward: then call again after it."""
        self._is_closed = True
        self.restart()
        return self._trace is None

    def now(self) -> Moment:
        mark = 0 if self._trace is None else self._trace.mark()
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))  # the current device may be another one
        return Moment(time.perf_counter(), mark, event)

    def stop(self) -> list[Measured] | None:
        """Stop measuring, and return the measurements of the calls with a forward and a backward. Always call this.

        None if the trace runs on, as on another thread than the one that has begun it: `close` stops it later.
        """
        trace = self._trace
        if trace is None:
            return []
        self.note_kept()
        if not trace.stop():
            return None
        self._remove_hooks()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        calls = ((call, call.ended, call.backward) for call in self._calls)
        complete = [
            (each, ended, backward) for each, ended, backward in calls if ended is not None and backward is not None
        ]
        complete.sort(key=lambda each: each[2].host)
        return [self._measured(trace, *each) for each in complete]

    def _remove_hooks(self) -> None:
        """Remove the hooks of `note_end` and `note_gradients`: a leaf keeps them as long as it lives."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._arrived = [], []
        self._awaited.clear()

    def _end(self, call: CallMoments, backward: Moment) -> Moment | None:
        """When the call's backward, which began then, has ended; or the next forward or backward of a call began.

        In a pipeline, forwards run between backwards. An input that many blocks read gets its gradient long after.
        """
        begun = [at for other in self._calls for at in (other.began, other.backward)]
        later = (at for at in (*begun, call.finished) if at is not None and at.host > backward.host)
        return min(later, key=lambda at: at.host, default=None)

    def _measured(self, trace: MemoryTrace, call: CallMoments, ended: Moment, backward: Moment) -> Measured:
        """What the trace tells of a call whose forward has `ended`, and whose `backward` began."""
        end = self._end(call, backward)
        return Measured(
            call.digest,
            call.policy,
            None if call.was_recorded else trace.growth(call.began.mark, ended.mark),
            None if end is None else trace.transient(backward.mark, end.mark, call.input_gradients),
            _seconds(call.began, ended) if call.times_forward else None,
            _seconds(backward, end) if call.times_backward and end is not None else None,
        )


def _seconds(begin: Moment, end: Moment) -> float:
    if begin.event is not None and end.event is not None:
        return begin.event.elapsed_time(end.event) / 1000
    return end.host - begin.host
