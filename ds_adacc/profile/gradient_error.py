"""How far a compressed value puts the block's gradient off, measured on the captured call's own autograd graph."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from ds_adacc import planner
from ds_adacc.log import get_logger
from ds_adacc.profile.block_graph import block_graph
from ds_adacc.profile.codecs import CodecMaker, empty_holder
from ds_adacc.profile.timer import device_of
from ds_adacc.record.capture import Capture
from ds_adacc.record.recording import RecordedOp, Recording, ValueRef
from ds_adacc.record.replay import replay
from ds_adacc.record.saved import keep
from ds_adacc.record.signature import flatten

_SEED = 0
GradientTensors = Sequence[torch.Tensor | None]


def gradient_errors(
    captured: Capture, recording: Recording, profile: planner.Profile, codecs: CodecMaker
) -> planner.Profile:
    """`profile` with the gradient error of every codec on offer.

    It is ‖g − g₀‖ / ‖g₀‖ over the gradients of all the block's parameters and inputs together. For g, the value is
    decompressed from its payload, whatever one replay makes of it is rebuilt from that, and all else is exact. The
    gradient of the output is random, and the same for all codecs.

    `captured` must not have been handed over. Rule 3: its graph stays usable, no `.grad` is written, and the generators
    are put back. Rule 5: a codec whose error is not finite is no longer offered; where nothing can be measured, a
    warning says why, and no lossy codec is offered.
    """
    probe = _Probe(captured, recording)
    reason = probe.refusal()
    if reason is not None:
        get_logger().warning(
            "block %s: no lossy codec is used, since adacc.max_gradient_error is set but cannot be checked (%s); "
            "unset it to allow lossy codecs without a bound",
            recording.name,
            reason,
        )
        return replace(profile, codecs=tuple(tuple(c for c in costs if c.error == 0) for costs in profile.codecs))
    device = device_of(captured.tensors)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        exact = probe.gradient({})
        offers = tuple(
            tuple(_with_error(cost, index, probe, exact, codecs) for cost in costs)
            for index, costs in enumerate(profile.codecs)
        )
    finite = tuple(tuple(cost for cost in costs if cost is not None) for costs in offers)
    return replace(profile, codecs=finite)


def random_gradients(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A normally distributed gradient for each output, the same at each call, from a generator of its own (Rule 3)."""
    generators = {device: torch.Generator(device).manual_seed(_SEED) for device in {o.device for o in outputs}}
    return [torch.randn(o.shape, generator=generators[o.device], dtype=o.dtype, device=o.device) for o in outputs]


def relative_error(gradient: GradientTensors, exact: GradientTensors) -> float:
    """‖g − g₀‖ / ‖g₀‖ over all tensors together; None stands for a gradient of zeros."""
    pairs = zip(gradient, exact, strict=True)
    off = _norm(a - b if a is not None and b is not None else a if b is None else b for a, b in pairs)
    norm = _norm(exact)
    return off / norm if norm else off and math.inf


class _Probe:
    """Backward passes of one captured call, with other tensors in place of some that it has saved."""

    def __init__(self, captured: Capture, recording: Recording) -> None:
        outputs: list[torch.Tensor] = []
        flatten(captured.output, outputs)
        starts = (t for t in (*captured.inputs, *recording.parameters) if t.requires_grad)
        self.captured = captured
        self.recording = recording
        self._ends = [tensor for tensor in outputs if tensor.grad_fn is not None]
        self._starts = list({id(tensor): tensor for tensor in starts}.values())
        self._random = random_gradients(self._ends)
        self._children = children(recording)

    def refusal(self) -> str | None:
        """Why backward must not be run ahead of training's own (Rule 4); None if it may."""
        if not self._ends or not self._starts:
            return "no gradient flows through the tensors that it takes and returns"
        for op in self.recording.ops:
            if op.is_collective:
                return f"it calls {op.name}, a collective"
        if any(tensor._backward_hooks or tensor.retains_grad for tensor in self._starts):
            return "a hook on a parameter or an input waits for its gradient"
        for node in _nodes(self._ends, self._starts):
            if isinstance(node, torch.autograd.function.BackwardCFunction) or "CppNode" in node.name():
                return f"its backward runs {node.name()}, which may hold a collective"
        return None

    def gradient(self, roots: Mapping[int, torch.Tensor]) -> GradientTensors:
        """The gradients of parameters and inputs when the values with these indices are `roots`."""
        with self._substituted(roots):
            return torch.autograd.grad(self._ends, self._starts, self._random, retain_graph=True, allow_unused=True)

    def rebuilt(self, index: int, root: torch.Tensor) -> dict[int, torch.Tensor]:
        """`root` in place of value `index`, and the saved values that one replay makes of it, by index."""
        exact, roots = self.captured.tensors, {index: root}
        for op in self._children.get(index, ()):
            outputs = replay(op, lambda i: root if i == index else exact[i], self.recording.parameters)
            made = zip(op.outputs, outputs, strict=False)
            roots.update((i, output) for i, output in made if i is not None and i in self.recording.saved)
        return roots

    @contextmanager
    def _substituted(self, roots: Mapping[int, torch.Tensor]) -> Iterator[None]:
        positions = zip(self.captured.slots, self.recording.positions, strict=True)
        own = [
            (slot, slot.slot, p.ref) for slot, p in positions if isinstance(p.ref, ValueRef) and p.ref.index in roots
        ]
        try:
            for slot, _, ref in own:
                slot.slot = keep(ref.geometry.view(roots[ref.index]))
            yield
        finally:
            for slot, exact, _ in own:
                slot.slot = exact


def _with_error(
    cost: planner.CodecCost, index: int, probe: _Probe, exact: GradientTensors, codecs: CodecMaker
) -> planner.CodecCost | None:
    """The cost with its gradient error; None if that is not finite (Rule 5)."""
    if cost.error == 0:
        return cost
    tensor = probe.captured.tensors[index]
    holder = empty_holder(cost.codec, probe.recording.values[index], tensor, codecs)
    holder.fill(tensor)
    error = relative_error(probe.gradient(probe.rebuilt(index, holder.get())), exact)
    return replace(cost, gradient_error=error) if math.isfinite(error) else None


def children(recording: Recording) -> dict[int, list[RecordedOp]]:
    """For each value the operators that may be replayed from it: their other inputs are parameters or can be stored."""
    storable = [value.storable for value in block_graph(recording).values]
    readers: dict[int, list[RecordedOp]] = {}
    for op in recording.ops:
        for index in op.reads if op.replayable else ():
            if all(storable[other] for other in op.reads if other != index):
                readers.setdefault(index, []).append(op)
    return readers


def _nodes(ends: Sequence[torch.Tensor], starts: Sequence[torch.Tensor]) -> Iterator[torch.autograd.graph.Node]:
    """The nodes of the autograd graph from `ends` back to `starts`, and any others that `ends` depend on."""
    met = {torch.autograd.graph.get_gradient_edge(tensor).node for tensor in starts}
    pending = [tensor.grad_fn for tensor in ends]
    while pending:
        node = pending.pop()
        if node is not None and node not in met:
            met.add(node)
            pending.extend(following for following, _ in node.next_functions)
            yield node


def _norm(tensors: Iterable[torch.Tensor | None]) -> float:
    """The norm of all tensors together, summed in double precision."""
    squares = [torch.linalg.vector_norm(t, dtype=_double(t)).item() ** 2 for t in tensors if t is not None]
    return math.sqrt(math.fsum(squares))


def _double(tensor: torch.Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64
