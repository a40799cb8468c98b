"""Time every operator's replay and every codec on offer, on the block's own tensors (Rule 1)."""

from __future__ import annotations

import torch

from ds_adacc import planner
from ds_adacc.execute.bound_policy import rows
from ds_adacc.profile.block_graph import block_graph
from ds_adacc.profile.codecs import CodecMaker, empty_holder
from ds_adacc.profile.timer import Timer
from ds_adacc.profile.workspace import workspaces
from ds_adacc.record.capture import Capture
from ds_adacc.record.generators import unmoved
from ds_adacc.record.pieces import pieces
from ds_adacc.record.recording import RecordedOp, RecordedValue, Recording
from ds_adacc.record.replay import replay
from ds_adacc.record.tensors import RecordedTensors

_SUMMABLE = (torch.float32, torch.float16, torch.bfloat16)


def measure(recording: Recording, captured: Capture, codecs: CodecMaker) -> planner.Profile:
    """The block's profile. The tensors of the captured call must still be alive. Rule 3: no generator is moved."""
    with unmoved(recording.generators):
        seconds, offers, noise = _times(recording, captured.tensors, codecs)
        # A backward step takes its operator's tensors twice over, for which there is no room beside the whole block.
        ops = [recording.ops[index] for index in block_graph(recording).rebuildable_ops]
        values = {index for op in ops for index in (*op.outputs, *op.written) if index is not None}
        with captured.without([index for index in values if recording.values[index].owned]):
            taken = workspaces(recording, captured.tensors)
    # What a copy to the host, and one back, may hide behind.
    overlap = sum(seconds), sum(each.backward_seconds for each in taken)
    return planner.Profile(block_graph(recording, taken), seconds, offers, overlap, noise)


def _times(
    recording: Recording, tensors: RecordedTensors, codecs: CodecMaker
) -> tuple[tuple[float, ...], tuple[tuple[planner.CodecCost, ...], ...], float]:
    """The seconds of each operator's replay, the codecs on offer for each value, and the noise of these times."""
    alive = [tensors.at_hand(value.index) for value in recording.values if value.owned]
    others = [t for t in (*alive, *recording.parameters) if t is not None and t.dtype in _SUMMABLE]
    timer = Timer(tensors.device, others)
    rebuildable = block_graph(recording).rebuildable_ops  # of others no policy makes use, and some inputs have died
    seconds = tuple(
        _replay_seconds(op, recording, tensors, timer) if op.index in rebuildable else 0.0 for op in recording.ops
    )
    offers = tuple(
        tuple(_cost(name, value, tensors[value.index], codecs, timer) for name in names)
        for value, names in ((v, codecs.on_offer(v, recording)) for v in recording.values)
    )
    worthwhile = tuple(
        tuple(cost for cost in costs if cost.nbytes < value.nbytes)
        for value, costs in zip(recording.values, offers, strict=True)
    )
    return seconds, worthwhile, timer.noise


def _replay_seconds(op: RecordedOp, recording: Recording, tensors: RecordedTensors, timer: Timer) -> float:
    inputs = tensors.inputs(op.needs)
    return timer(lambda: replay(op, inputs.__getitem__, recording.parameters))


def _cost(name: str, value: RecordedValue, tensor: torch.Tensor, codecs: CodecMaker, timer: Timer) -> planner.CodecCost:
    if name == planner.OFFLOAD:  # a copy's time depends on its bytes alone, so the link is timed once, not each value
        out, back = (value.nbytes * seconds for seconds in codecs.byte_seconds(tensor.device))
        return planner.CodecCost(planner.OFFLOAD, 0, out, back, error=0.0, workspace_bytes=0)
    holder = empty_holder(name, value, tensor, codecs)
    codec, shape, dtype = holder.codec, torch.Size(rows(value)), value.geometry.dtype
    compress = timer(lambda: holder.fill(tensor))
    decompress = timer(holder.get)
    return planner.CodecCost(
        codec=name,
        nbytes=codec.payload_bytes(shape, dtype),
        compress_seconds=compress,
        decompress_seconds=decompress,
        error=_relative_error(tensor, holder.get()),
        workspace_bytes=codec.workspace_bytes(shape, dtype),
    )


def _relative_error(exact: torch.Tensor, approximate: torch.Tensor) -> float:
    """‖x − x̂‖ / ‖x‖, 0 for two tensors of zeros."""
    if exact.dtype is torch.bool:
        return float((exact != approximate).any())
    squares = torch.zeros(2, dtype=torch.float64, device=exact.device)
    for one, other in pieces(exact, approximate):
        squares += torch.stack([one.double().square_().sum(), (one.double() - other).square_().sum()])
    norm, error = squares.sqrt().tolist()
    return error / norm if norm else 0.0
