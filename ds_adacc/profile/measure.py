"""The profile of a block: the costs of its operators and of every codec on offer, on its own tensors (Rule P1)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ds_adacc import planner
from ds_adacc.execute.bound_policy import flat
from ds_adacc.profile.block_graph import block_graph
from ds_adacc.profile.codecs import CodecMaker, empty_holder
from ds_adacc.profile.operator_costs import operator_costs, others
from ds_adacc.profile.timer import Timer
from ds_adacc.program.generators import unmoved
from ds_adacc.program.recording import RecordedValue, Recording
from ds_adacc.program.same_bits import pieces
from ds_adacc.record.capture import Capture
from ds_adacc.record.tensors import RecordedTensors


def measure(recording: Recording, captured: Capture, codecs: CodecMaker) -> planner.Profile:
    """The block's profile. The tensors of the captured call must still be alive. Rule P3: no generator is moved."""
    with unmoved(recording.generators):
        timer = Timer(captured.tensors.device)
        offers = _offers(recording, captured.tensors, codecs, timer)
        # Replays and backward steps make their operator's tensors anew, for which there is no room beside the block.
        ops = [recording.ops[index] for index in block_graph(recording).rebuildable_ops]
        values = {index for op in ops for index in (*op.outputs, *op.written) if index is not None}
        with captured.without([index for index in values if recording.values[index].owned]):
            costs = operator_costs(recording, captured.tensors, timer)
    seconds = tuple(cost.replay_seconds for cost in costs)
    # What a copy to the host, and one back, may hide behind.
    overlap = sum(seconds), sum(cost.backward_seconds for cost in costs)
    return planner.Profile(block_graph(recording, costs), seconds, offers, overlap, timer.noise)


def _offers(
    recording: Recording, tensors: RecordedTensors, codecs: CodecMaker, timer: Timer
) -> tuple[tuple[planner.CodecCost, ...], ...]:
    """The codecs on offer for each value that take fewer bytes than the value itself."""
    timed = partial(timer, others=others(recording, tensors))
    costs = (
        [_cost(name, value, tensors[value.index], codecs, timed) for name in codecs.on_offer(value, recording)]
        for value in recording.values
    )
    return tuple(
        tuple(cost for cost in found if cost.nbytes < value.nbytes)
        for value, found in zip(recording.values, costs, strict=True)
    )


def _cost(
    name: str, value: RecordedValue, tensor: torch.Tensor, codecs: CodecMaker, timed: Callable[[Callable], float]
) -> planner.CodecCost:
    if name == planner.OFFLOAD:  # a copy's time depends on its bytes alone, so the link is timed once, not each value
        out, back = (value.nbytes * seconds for seconds in codecs.byte_seconds(tensor.device))
        return planner.CodecCost(planner.OFFLOAD, 0, out, back, error=0.0, workspace_bytes=0)
    holder = empty_holder(name, value, tensor, codecs)
    codec, seen, dtype = holder.facts.codec, flat(value), value.geometry.dtype
    compress = timed(lambda: holder.fill(seen.view(tensor)))
    decompress = timed(holder.get)
    return planner.CodecCost(
        codec=name,
        nbytes=codec.payload_bytes(seen.size, dtype),
        compress_seconds=compress,
        decompress_seconds=decompress,
        error=_relative_error(tensor, holder.get()),
        workspace_bytes=codec.workspace_bytes(seen.size, dtype),
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
