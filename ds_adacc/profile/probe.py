"""Runs a block's backward several times, with other tensors in place of those it has saved, when its gradient arrives.

A probed call can give back exactly all that it has saved, so its own gradient is exact. When backward reaches the
block's output, the gradient that training really brings is at hand, and under ZeRO-3 the block's parameters are
gathered. There the probe runs the block's part of backward alone: once as it is, and once for each policy that is
measured.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ds_adacc.execute.bound_policy import BoundPolicy
from ds_adacc.execute.call import Call
from ds_adacc.execute.course import states_at
from ds_adacc.log import get_logger
from ds_adacc.planner import HOPELESS
from ds_adacc.profile.arrival import Entrance, watch
from ds_adacc.profile.unmeasurable import is_awaited
from ds_adacc.program import compiled_backward
from ds_adacc.program.generators import unmoved
from ds_adacc.program.nodes import nodes_behind
from ds_adacc.program.recording import Recording
from ds_adacc.program.same_bits import pieces
from ds_adacc.program.slots import CopyingSlot, ParameterSlot, Slot, keep
from ds_adacc.record.late_slots import LateSlot

Measure = Callable[[BoundPolicy], float]
Study = Callable[[Measure, bool], None]
Gradients = Sequence[torch.Tensor | None]


class Probe:
    """One probed call. `study` is given a function that measures the gradient error of a policy.

    It is also told whether that measures under the gradient that training brought. A random one takes its place if that
    gradient is not finite, as in a step that a loss scaler skips; or zero, as long as the loss has a weight of 0. Under
    a gradient of zeros every policy would have an error of 0.

    The gradient is that of one output, which `entrance` chooses. So the block's backward may leave saved tensors
    unread, which serve other outputs, or an auxiliary loss that the block has put elsewhere. To alter such tensors may
    do harm that is not measured here. So a policy that alters one counts as above every bound.

    `slots` are what autograd holds in place of the call's saved tensors, in the order of the pack hook. Each must give
    back its tensor exactly; those of tensors that the block discards hold an empty one. `inputs` are the tensors that
    the block was given, still in the autograd graph. `noted`: by value, the buffers before the call's forward, and the
    states that random generators had in it, for replays.

    Rule P3: the graph stays usable, no `.grad` is written, and the generators are put back.
    """

    def __init__(self, recording: Recording, inputs: Sequence[torch.Tensor], study: Study, entrance: Entrance) -> None:
        self._entrance = entrance
        self.slots: Sequence[LateSlot] = []
        self._positions = recording.positions
        self.noted: dict[int, torch.Tensor] = recording.read_buffers()
        self._to_note = states_at(recording.draws)
        self._generators = recording.generators
        # The backward of a Function may write to its gradient and to what it has saved, as Liger-Kernel's do.
        self._copies = any(op.is_function for op in recording.ops)
        self._copied: list[bool] = []
        self._graphs = [run.cls for run in recording.graphs]
        self._note(-1)
        self._study = study
        self._name = recording.name
        self._inputs = [tensor.detach() for tensor in inputs]
        self._versions = [tensor._version for tensor in inputs]
        self._starts = [weakref.ref(tensor) for tensor in (*inputs, *recording.parameters) if tensor.requires_grad]
        self._is_awaited = self._is_awaited_now()
        # The edges, not the tensors: these would keep the inputs' memory.
        of_inputs = _edges(inputs)
        # A buffer may stand in the place of a parameter, as with `torch.func.functional_call`.
        of_parameters = _edges([*recording.parameters, *recording.read_buffers().values()])
        # What the graph before the block leads to as well (a tied weight, a bias that earlier blocks read) is left out:
        # autograd would run that part of the graph too.
        before = _before(edge.node for edge in of_inputs)
        self._of_inputs = [edge for edge in of_inputs if edge.node not in before]
        self._of_parameters = [edge for edge in of_parameters if edge.node not in before]

    def pack(self, inner: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Slot]:
        """A pack hook around `inner`, whose slots must give back every tensor exactly."""
        slots: list[LateSlot] = []
        self.slots = slots

        def packed(tensor: torch.Tensor) -> Slot:
            number = len(slots)
            self._note(number)
            slot = LateSlot(inner(tensor))
            # What is discarded must die with the forward, so only autograd holds its slot.
            is_discarded = number < len(self._positions) and self._positions[number].discarded
            slots.append(LateSlot(keep(torch.empty(0))) if is_discarded else slot)
            return slot

        return packed

    def _note(self, position: int) -> None:
        for index, generator in self._to_note.get(position, {}).items():
            self.noted[index] = generator.get_state()

    def watch(self, output: Any) -> Any:
        """The block's output, of which one tensor tells this probe when its gradient arrives (`arrival.watch`)."""
        return watch(output, self._inputs, self._entrance, self.arrive)

    def arrive(self, edge: GradientEdge, gradient: torch.Tensor) -> None:
        """Run the study, and leave the call's own slots to backward."""
        self._entrance.is_reached = True
        if any(tensor._version != version for tensor, version in zip(self._inputs, self._versions, strict=True)):
            return  # the program wrote to an input since: what the call held of it is for backward to judge
        if self._is_awaited or self._is_awaited_now():
            return  # Rule P4: other blocks of the type, and this one in other steps, may have no hooks
        if not all(map(compiled_backward.has_run, self._graphs)):
            return  # a later call measures: training's own backward is to be the first
        own = [slot.slot for slot in self.slots]
        # No backward writes to a parameter, and a compiled one takes all parameters of its block at once.
        self._copied = [self._copies and not isinstance(slot, ParameterSlot) for slot in own]
        self._entrance.is_probing = True
        try:
            self._learn(edge, gradient, own)
        except torch.OutOfMemoryError:
            get_logger().warning(
                "block %s: memory ran out while its gradient error was measured. A new policy does not come into "
                "force unmeasured; one that is in force stays. A smaller micro-batch leaves room to measure",
                self._name,
            )
        finally:
            self._entrance.is_probing = False
            for slot, held in zip(self.slots, own, strict=True):
                slot.slot = held

    def _is_awaited_now(self) -> bool:
        return is_awaited(tensor for reference in self._starts if (tensor := reference()) is not None)

    def _learn(self, edge: GradientEdge, gradient: torch.Tensor, own: Sequence[Slot]) -> None:
        counting = [_Counting(slot) for slot in own]
        self._hold(counting)
        gradients = self._backward(edge, gradient)
        times = [slot.times for slot in counting]
        is_training = bool(gradient.any()) and all(map(_is_finite, gradients))
        if not is_training:
            gradient = _random_like(gradient)
            gradients = self._backward(edge, gradient)
            if not all(map(_is_finite, gradients)):
                return
        _even(counting)
        unread = self._unread(times)

        def measure(bound: BoundPolicy) -> float:
            if any(index in unread and not codec.lossless for index, codec in bound.codecs.items()):
                return HOPELESS
            call = Call(bound, self._inputs, noted=self.noted)
            try:
                # Each is given up as soon as it is packed: all of them beside their payloads would exceed the block.
                exact = [slot.unpack() for slot in own]
                exact.reverse()
                self._hold([self._lent(call.pack(exact.pop()), number) for number in times])
                if call.diverged:  # then it holds exactly what the policy would not
                    return HOPELESS
                call.release()
                call.close()
                return self._error(self._backward(edge, gradient), gradients)
            finally:
                self._hold(own)

        with unmoved(self._generators), torch.no_grad():
            self._study(measure, is_training)

    def _unread(self, times: Sequence[int]) -> frozenset[int]:
        """The values that backward has not read, though they are saved. `times`: how often it has read each slot."""
        saved = [position.value for position in self._positions]
        read = {value for value, count in zip(saved, times, strict=False) if count}
        return frozenset(value for value in saved if value is not None) - read

    def _lent(self, slot: Slot, times: int) -> Slot:
        """A slot of which the pass lets go where training's own backward would: no more is alive then.

        What the backward of a Function reads, and how often, may follow from data.
        """
        return slot if self._copies else _Lent(slot, times)

    def _hold(self, slots: Iterable[Slot]) -> None:
        """Let backward take its tensors from these slots, and leave them as they are."""
        for slot, held, is_copied in zip(self.slots, slots, self._copied, strict=True):
            slot.slot = CopyingSlot(held) if is_copied else held

    def _backward(self, edge: GradientEdge, gradient: torch.Tensor) -> Gradients:
        starts = [*self._of_inputs, *self._of_parameters]
        gradient = gradient.clone() if self._copies else gradient
        # Its own draws begin from one state in each run, and training's from the state that they would have had.
        with unmoved(self._generators), compiled_backward.given_copies() if self._graphs else nullcontext():
            return torch.autograd.grad((edge,), starts, (gradient,), retain_graph=True, allow_unused=True)

    def _error(self, gradients: Gradients, exact: Gradients) -> float:
        inputs = len(self._of_inputs)
        parts = (slice(None, inputs), slice(inputs, None))
        return max(relative_error(gradients[part], exact[part]) for part in parts)


class _Counting:
    """A slot that counts how often it gives its tensor."""

    __slots__ = ("_slot", "times")

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self.times = 0

    def unpack(self) -> torch.Tensor:
        self.times += 1
        return self._slot.unpack()


def _even(slots: Sequence[_Counting]) -> None:
    """Let all slots have given their tensors equally often: then no replay keeps results for uses to come (Rule E6)."""
    most = max((slot.times for slot in slots), default=0)
    for slot in slots:
        while slot.times < most:
            slot.unpack()


class _Lent:
    """A slot that gives its tensor so many times, and then lets go of it."""

    __slots__ = ("_slot", "_times")

    def __init__(self, slot: Slot, times: int) -> None:
        self._slot: Slot | None = slot
        self._times = times

    def unpack(self) -> torch.Tensor:
        assert self._slot is not None, "backward reads a saved tensor more often than it did before"
        tensor, self._times = self._slot.unpack(), self._times - 1
        if self._times <= 0:
            self._slot = None
        return tensor


def relative_error(gradients: Gradients, exact: Gradients) -> float:
    """How far `gradients` are from the `exact` ones; `planner.HOPELESS` if something is not finite.

    It is the larger of two: ‖g − g₀‖ / ‖g₀‖ over all tensors together, and the root mean square of the same for each
    tensor. The second is what an optimizer sees that scales each parameter by itself, as Adam does. There, a tensor
    whose exact gradient is small counts with the root mean square of all norms in place of its own: the gradient of a
    key's bias is zero in exact arithmetic, since softmax does not see that bias. None stands for a gradient of zeros.
    """
    if not exact:
        return 0.0
    norms = [_norm(tensor) for tensor in exact]
    off = [_norm(*pair) for pair in zip(gradients, exact, strict=True)]
    total, floor = math.hypot(*norms), math.hypot(*norms) / math.sqrt(len(norms))
    if not all(map(math.isfinite, off)):
        return HOPELESS
    if not any(off):
        return 0.0
    if not total:
        return HOPELESS
    of_each = [error / max(norm, floor) for error, norm in zip(off, norms, strict=True)]
    return min(max(math.hypot(*off) / total, math.hypot(*of_each) / math.sqrt(len(off))), HOPELESS)


def _edges(tensors: Iterable[torch.Tensor]) -> list[GradientEdge]:
    distinct = {id(tensor): tensor for tensor in tensors if tensor.requires_grad}
    return [get_gradient_edge(tensor) for tensor in distinct.values()]


def _before(nodes: Iterable[torch.autograd.graph.Node]) -> set[torch.autograd.graph.Node]:
    """The nodes of the autograd graph to which these lead, without themselves unless one leads to another."""
    return set(nodes_behind([following for node in nodes for following, _ in node.next_functions], set()))


def _norm(*given: torch.Tensor | None) -> float:
    """The norm of a tensor, or of the difference of two, summed in double precision. None stands for zeros."""
    tensors = [tensor for tensor in given if tensor is not None]
    if not tensors:
        return 0.0
    double = torch.complex128 if tensors[0].is_complex() else torch.float64
    total = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    for one, *other in pieces(*tensors):
        total += torch.linalg.vector_norm(one - other[0] if other else one, dtype=double).square()
    return math.sqrt(float(total))


def _random_like(gradient: torch.Tensor) -> torch.Tensor:
    """A small, normally distributed gradient, always the same, from a generator of its own."""
    generator = torch.Generator(gradient.device).manual_seed(0)
    options = {"dtype": gradient.dtype, "device": gradient.device}
    return torch.randn(gradient.shape, generator=generator, **options) / max(gradient.numel(), 1) ** 0.5


def _is_finite(tensor: torch.Tensor | None) -> bool:
    return math.isfinite(_norm(tensor))
