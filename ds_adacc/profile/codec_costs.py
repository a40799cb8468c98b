"""What each codec on offer costs for each value: seconds, bytes and error, on the block's own tensors (Rule P1)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ds_adacc import planner
from ds_adacc.execute.course import flat
from ds_adacc.profile.codec_maker import CodecMaker, empty_holder
from ds_adacc.profile.operator_costs import others
from ds_adacc.profile.timer import Timer
from ds_adacc.program.recording import RecordedValue, Recording
from ds_adacc.program.same_bits import pieces
from ds_adacc.record.tensors import RecordedTensors


def codec_costs(
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
        return planner.CodecCost.offload(value.nbytes, out, back)
    holder = empty_holder(name, value, tensor, codecs)
    codec, seen, dtype = holder.facts.codec, flat(value), value.geometry.dtype
    compress = timed(lambda: holder.fill(seen.view(tensor)))
    decompress = timed(holder.get)
    return planner.CodecCost(
        codec=name,
        nbytes=codec.payload_bytes(seen.size, dtype),
        compress_seconds=compress,
        decompress_seconds=decompress,
        error=0.0 if codec.lossless else _relative_error(tensor, holder.get()),
        workspace_bytes=codec.workspace_bytes(seen.size, dtype),
        lossless=codec.lossless,
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
