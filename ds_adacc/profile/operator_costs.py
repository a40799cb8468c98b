"""What an operator costs, in a replay and in its backward step: its time, and the bytes that it frees again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch.autograd.graph import saved_tensors_hooks

from ds_adacc.profile.block_graph import OperatorCost
from ds_adacc.profile.memory_trace import MemoryTrace
from ds_adacc.profile.timer import Timer
from ds_adacc.program.arguments import ParameterRef, ValueRef
from ds_adacc.program.recorded_op import RecordedOp
from ds_adacc.program.recording import Recording
from ds_adacc.program.registration import computes_only
from ds_adacc.program.replay import live, replay, run
from ds_adacc.program.slots import copy_of
from ds_adacc.record.tensors import RecordedTensors

_SUMMABLE = (torch.float32, torch.float16, torch.bfloat16)
Inputs = Mapping[int, torch.Tensor]  # by value index: what an operator reads


def operator_costs(recording: Recording, tensors: RecordedTensors, timer: Timer) -> tuple[OperatorCost, ...]:
    """What each operator costs, on the block's own tensors. One that no policy could replay costs nothing in a replay.

    Values that have died are rebuilt as forward made them, and held from their operator to their last reader. What an
    operator in place overwrites is replayed with it, but each of the two has a backward step.
    """
    device = tensors.device
    rebuildable = recording.segments.rebuildable
    last = {need: index for index in sorted(rebuildable) for need in recording.ops[index].needs}
    writes = recording.backward.writes_to_views
    costs = [_of_write(op) if op.index in writes else OperatorCost() for op in recording.ops]
    rebuilt = set[int]()
    for index in sorted(rebuildable):
        op = recording.ops[index]
        inputs = {need: tensors[need] for need in op.needs}
        replayed = replay_workspace(op, inputs, recording.parameters, device)
        seconds = replay_seconds(op, inputs, recording, others(recording, tensors, op), timer)
        for part in op.parts:
            if part.index not in writes:
                costs[part.index] = _of_backward(part, inputs, recording, seconds, device)
        costs[index] = replace(costs[index], replay_bytes=replayed, replay_seconds=seconds)
        del inputs
        died = {i for i in op.outputs if i is not None and last.get(i, -1) > index and tensors.at_hand(i) is None}
        for i in died:
            tensors.hold(i)
        done = {i for i in rebuilt if last[i] <= index}
        tensors.drop(done)
        rebuilt = (rebuilt - done) | died
    return tuple(costs)


def _of_backward(
    op: RecordedOp, inputs: Inputs, recording: Recording, seconds: float, device: torch.device
) -> OperatorCost:
    """What its backward step costs. `seconds`: of its replay."""
    if op.is_graph:
        return _of_graph(op, recording, seconds)
    cost = of_backward_step(op, inputs, recording, device)
    if cost.backward_bytes and op.is_aten:
        early = early_workspace(op, inputs, recording, device)
        cost = replace(cost, early_bytes=int(min(early, cost.backward_bytes)))
    return cost


def others(recording: Recording, tensors: RecordedTensors, op: RecordedOp | None = None) -> list[torch.Tensor]:
    """What the block holds besides what `op` reads: read before `op` is timed, it takes the caches."""
    needs = set() if op is None else set(op.needs)
    read = {ref.index for part in op.parts for ref in part.references if isinstance(ref, ParameterRef)} if op else set()
    alive = [tensors.at_hand(value.index) for value in recording.values if value.owned and value.index not in needs]
    parameters = [parameter for index, parameter in enumerate(recording.parameters) if index not in read]
    return [t for t in (*alive, *parameters) if t is not None and t.dtype in _SUMMABLE]


def replay_seconds(
    op: RecordedOp, inputs: Inputs, recording: Recording, others: Sequence[torch.Tensor], timer: Timer
) -> float:
    """Seconds of a replay of `op`, timed beside these other tensors."""
    return timer(partial(replay, op, inputs.__getitem__, recording.parameters), others)


def replay_workspace(op: RecordedOp, inputs: Inputs, parameters: Sequence[torch.Tensor], device: torch.device) -> int:
    """Bytes that a replay of `op` takes at its peak besides its outputs; 0 if never replayed, or unknown (Rule P6)."""
    if not op.replayable:
        return 0
    with MemoryTrace(device) as trace:
        outputs = replay(op, inputs.__getitem__, parameters)
    del outputs  # until here, so that `left` is their bytes
    return (trace.peak or 0) - (trace.left or 0)


def of_backward_step(op: RecordedOp, inputs: Inputs, recording: Recording, device: torch.device) -> OperatorCost:
    """What the backward step costs: run once after `op`, in a graph of its own (Rule P3). Results serve as gradients.

    All is 0 for an operator that is never replayed, writes in place, or has no derivative, and for an
    `autograd.Function` whose backward may do more than compute gradients. Memory that stays allocated (a library's own)
    does not count.
    """
    try:
        starts, ends = _apart(op, inputs, recording) if _may_run(op) else ([], [])
        if not ends:
            return OperatorCost()
        step, timer = _step(op, starts, ends, op.index in recording.backward.strided), Timer(device)
        with MemoryTrace(device) as trace:
            seconds = timer.once(step)
        if device.type == "cuda":  # that run has also loaded kernels and made the libraries' handles
            seconds = timer(step)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # an operator without a derivative may raise anything
        return OperatorCost()
    taken = _beyond(trace, _bytes_of(starts))
    return OperatorCost(backward_bytes=taken, early_bytes=taken, backward_seconds=seconds)


def _of_write(op: RecordedOp) -> OperatorCost:
    """What the backward step takes of an operator that writes to a view. It is not run: others may have read that.

    Beside the gradient of the whole, which it makes, it takes a copy of the part that the view is, of which it makes
    another unless it passes the copy on (`CopySlices::apply` in torch/csrc/autograd/functions/tensor.cpp).
    """
    view = next(op.references)  # the first argument is what it writes to
    taken = view.geometry.nbytes * (1 if op.functional_name in ("add", "sub") else 2)
    return OperatorCost(backward_bytes=taken, early_bytes=taken)


def _of_graph(op: RecordedOp, recording: Recording, seconds: float) -> OperatorCost:
    """What the backward of a compiled graph is taken to take. It is not run before training's own first one.

    It is taken to allocate one gradient as large as its largest saved tensor, with all others alive, and to take twice
    the `seconds` of its forward. An observed step corrects the bytes.
    """
    saved = op.outputs[op.func.place_of_saved]
    taken = max((recording.values[i].nbytes for i in saved if i is not None), default=0)
    return OperatorCost(backward_bytes=taken, early_bytes=taken, backward_seconds=2 * seconds)


def early_workspace(op: RecordedOp, inputs: Inputs, recording: Recording, device: torch.device) -> float:
    """The most workspace (bytes) that the step takes while it has what `op` saved; infinity if that is not known.

    The step unpacks copies, which live as long. If the peak lies outside their lifetime, the result is 0.
    """
    copies: list[int] = []

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        copy = copy_of(tensor)
        if copy.device.type == device.type:  # the state of a random generator may be on the host
            copies.append(copy.untyped_storage().nbytes())
        return copy

    try:
        # Detached: a saved output has the node that saves it, which would keep it for ever.
        with saved_tensors_hooks(torch.Tensor.detach, copied):
            starts, ends = _apart(op, inputs, recording)
            step = _step(op, starts, ends, op.index in recording.backward.strided)
            with MemoryTrace(device) as trace:
                step()
    except Exception:  # there may be no memory for the copies
        return math.inf
    return _beyond(trace, sum(copies) + _bytes_of(starts))


def _step(
    op: RecordedOp, starts: Sequence[torch.Tensor], ends: Sequence[torch.Tensor], strided: bool
) -> Callable[[], None]:
    """Runs backward from `ends` to `starts`, as often as it is called. It keeps the last gradients.

    `strided`: the gradients of `ends` are not contiguous, so the step may copy them.
    """
    gradients_of_ends, given = [end.detach() for end in ends], []
    if strided:
        gradients_of_ends = [_turned(each) for each in gradients_of_ends]
    if op.is_function:  # its backward may write to them
        gradients_of_ends = [gradient.clone() for gradient in gradients_of_ends]

    def step() -> None:
        # retain_graph: freeing tensors from before the trace would hide as many bytes that the step allocates
        given[:] = torch.autograd.grad(ends, starts, gradients_of_ends, retain_graph=True, allow_unused=True)

    return step


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in another memory order, as heads and positions of attention are exchanged."""
    if tensor.dim() < 2:
        return tensor
    first, second = (1, 2) if tensor.dim() > 2 else (0, 1)
    return tensor.transpose(first, second).contiguous().transpose(first, second)


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _beyond(trace: MemoryTrace, expected: int) -> int:
    """Bytes of the trace's peak beyond what is expected in it, or is left behind."""
    return max((trace.peak or 0) - max(trace.left or 0, expected), 0)


def _may_run(op: RecordedOp) -> bool:
    is_known = not op.is_function or computes_only(op.func.cls)
    return op.replayable and not op.bases and is_known


def _apart(op: RecordedOp, inputs: Inputs, recording: Recording) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A graph of `op` alone: its leaves that require a gradient, as they do in the block, and its outputs with one."""
    leaves: dict[ValueRef | ParameterRef, torch.Tensor] = {}

    def leaf(ref: ValueRef | ParameterRef) -> torch.Tensor:
        if ref not in leaves:
            if isinstance(ref, ValueRef):
                root, required = inputs[ref.index], ref.index in recording.with_gradient
            else:
                root, required = live(recording.parameters[ref.index]), recording.parameters[ref.index].requires_grad
            tensor = ref.geometry.view(root).detach()
            # The backward of a Function may write to what it has saved, as that of Liger-Kernel's SwiGLU does.
            tensor = tensor.clone() if op.is_function else tensor
            leaves[ref] = tensor.requires_grad_(required)
        return leaves[ref]

    with torch.enable_grad():
        outputs = run(op, leaf)
    ends = [o for i, o in zip(op.outputs, outputs, strict=False) if i in recording.with_gradient and o.requires_grad]
    return [tensor for tensor in leaves.values() if tensor.requires_grad], ends
