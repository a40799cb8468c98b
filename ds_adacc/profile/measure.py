"""The profile of a block: the costs of its operators and of every codec on offer, on its own tensors (Rule P1)."""

from __future__ import annotations

from ds_adacc import planner
from ds_adacc.profile.block_graph import block_graph
from ds_adacc.profile.codec_costs import codec_costs
from ds_adacc.profile.codec_maker import CodecMaker
from ds_adacc.profile.operator_costs import operator_costs
from ds_adacc.profile.timer import Timer
from ds_adacc.program.generators import unmoved
from ds_adacc.program.recording import Recording
from ds_adacc.python_watch.collector import uncollected
from ds_adacc.record.capture import Capture


def measure(recording: Recording, captured: Capture, codecs: CodecMaker) -> planner.Profile:
    """The block's profile. The tensors of the captured call must still be alive. Rule P3: no generator is moved."""
    with unmoved((*recording.generators, codecs.generator)), uncollected():  # Rule P10
        timer = Timer(captured.tensors.device)
        offers = codec_costs(recording, captured.tensors, codecs, timer)
        # Replays and backward steps allocate their operator's tensors again. Beside the block's own, there may be no
        # memory for that.
        ops = [recording.ops[index] for index in recording.segments.rebuildable]
        values = {index for op in ops for index in (*op.outputs, *op.written) if index is not None}
        with captured.without([index for index in values if recording.values[index].owned]):
            costs = operator_costs(recording, captured.tensors, timer)
    seconds = tuple(cost.replay_seconds for cost in costs)
    # What a copy to the host, and one back, may hide behind.
    overlap = sum(seconds), sum(cost.backward_seconds for cost in costs)
    return planner.Profile(block_graph(recording, costs), seconds, offers, overlap, timer.noise)
