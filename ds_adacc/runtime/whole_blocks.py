"""Which blocks are recomputed as a whole: those that read data, where the program has asked for that (Rule T7)."""

from __future__ import annotations

import types
from dataclasses import replace

import torch

from ds_adacc.execute.input_placement import InputPlacement
from ds_adacc.execute.variant import in_short
from ds_adacc.profile.whole_profile import WholeCosts
from ds_adacc.program.recording import Recording
from ds_adacc.program.signature import flatten
from ds_adacc.python_state.changes import rewritten
from ds_adacc.python_state.places import marks_of
from ds_adacc.python_state.reading import UnreadableModule
from ds_adacc.python_state.watch import Watch
from ds_adacc.record.as_whole import as_whole, why_not_again
from ds_adacc.record.block_call import BlockCall
from ds_adacc.runtime.incoming import Incoming

_DIFFERENTIATE = torch.autograd.grad.__code__, torch.autograd.backward.__code__
_ADVICE = (
    "To have the block recomputed as a whole, call it by ds_adacc.checkpointing.checkpoint, or enable the gradient "
    "checkpointing of transformers"
)


def as_decided(
    incoming: Incoming, recording: Recording, watch: Watch, placement: InputPlacement
) -> tuple[Recording, WholeCosts | None]:
    """The recording of a call that has just run, as it is to be planned: as one operator, with its costs, or as it is.

    `watch`: what the call was seen to read. `placement`: how the inputs of blocks are held. Where a second forward
    would save much and the program has not asked for it, or it must not be, a remark says so.
    """
    if recording.data_read_at is None:
        return recording, None
    costs = WholeCosts.of(recording)
    if not costs.are_worth_it:
        return recording, None
    reason = why_not_again(recording) or _why_not_now(incoming, watch, placement)
    if reason is not None:
        return _remarked(recording, f"The block is not recomputed as a whole either, since {reason}"), None
    if not incoming.signature.is_asked:
        return _remarked(recording, _ADVICE), None
    return as_whole(recording, incoming.block.class_name), costs


def _why_not_now(incoming: Incoming, watch: Watch, placement: InputPlacement) -> str | None:
    """Why the forward of the call must not run a second time, as far as the call itself tells."""
    if placement != InputPlacement():
        return "its inputs are to be partitioned or held on the host"
    if _gathers(incoming.call):
        return "ZeRO-3 gathers its parameters within it, by collectives that other ranks may not run again"
    if any(map(watch.has_seen, _DIFFERENTIATE)):
        return "it runs a backward in its forward"
    changed = _changed(incoming)
    return None if changed is None else f"its forward changes {changed}"


def _gathers(call: BlockCall) -> bool:
    """Whether hooks of ZeRO-3 run inside the call. Those of a leaf module run around its forward."""
    function = call.run.func
    is_forward = isinstance(function, types.MethodType) and function.__name__ == "forward"
    module = function.__self__ if is_forward else None
    partitioned = (parameter for parameter in call.closure.parameters if hasattr(parameter, "ds_id"))
    return any(module is None or getattr(each, "ds_z3_leaf_module", None) is not module for each in partitioned)


def _changed(incoming: Incoming) -> str | None:
    """What the call, which has run, has changed of that on which later calls depend; None: nothing that is guarded."""
    block, call = incoming.block, incoming.call
    if flatten((call.run.args, call.run.keywords), [], []) != incoming.signature.arguments:
        return "an argument"
    try:
        reading, _ = call.closure.read(marks_of(block.places), block.last_reading)
    except UnreadableModule:
        return "a module that it holds"
    # What has only come is taken to be the same after a second forward, such as an auxiliary loss in an attribute.
    changed = rewritten(incoming.guards, reading.marks)
    return in_short(changed) if changed else None


def _remarked(recording: Recording, remark: str) -> Recording:
    return replace(recording, remarks=(*recording.remarks, remark))
