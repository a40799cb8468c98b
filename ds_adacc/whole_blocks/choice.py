"""Which blocks are recomputed as a whole: those that read data, where the program has asked for that (Rule T7)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from ds_adacc.execute.incoming import Incoming
from ds_adacc.execute.input_placement import InputPlacement
from ds_adacc.plan.agreement import Agreement
from ds_adacc.plan.ranks import has_other_ranks
from ds_adacc.program.recording import Recording
from ds_adacc.program.refusals import TAINTED
from ds_adacc.program.signature import flatten
from ds_adacc.python_state.changes import rewritten
from ds_adacc.python_state.guard_history import in_short
from ds_adacc.python_state.guards import Guards, has_script, unreadable
from ds_adacc.python_state.places import marks_of
from ds_adacc.python_state.reading import UnreadableModule
from ds_adacc.record.capture import Capture
from ds_adacc.whole_blocks.beginning import Beginning
from ds_adacc.whole_blocks.costs import WholeCosts
from ds_adacc.whole_blocks.one_operator import as_whole, calls_collective, why_not_again
from ds_adacc.whole_blocks.second_forward import nodes_of
from ds_adacc.whole_blocks.written_buffers import why_not_put_back

_ADVICE = (
    "To have the block recomputed as a whole, call it by ds_adacc.checkpointing.checkpoint, or enable the gradient "
    "checkpointing of transformers"
)


class RecordedCall(NamedTuple):
    """A call that has just run. `guards`: the marks of all that it depends on.

    `beginning`, `arguments`: its beginning, and what `flatten` returned for its arguments. Both were taken before it
    ran, and are None if the program has not asked.
    """

    incoming: Incoming
    guards: Guards
    beginning: Beginning | None
    arguments: Hashable
    captured: Capture


def planned_recording(
    called: RecordedCall, recording: Recording, agreement: Agreement, ranks_agree: bool
) -> tuple[Recording, WholeCosts | None]:
    """The recording of the call as it is to be planned: as one operator, with its costs, or as it is.

    `ranks_agree`: whether all ranks agree on a plan. If the program has not asked for a second forward, or must not
    have one, a remark says what it would save. Raises RuntimeError if the other ranks run a second forward, and this
    rank cannot.
    """
    block = called.incoming.block
    repeats = has_other_ranks() and calls_collective(recording)
    if called.beginning is not None and block.name in agreement.repeated:
        if (reason := _why_not_the_same(called, recording)) is not None:
            raise RuntimeError(
                f"block {block.name}: backward runs its forward a second time on all ranks, as you ask for "
                f"checkpointing. But on this rank {reason}. Pass the generator to the block as an argument"
            )
        return as_whole(recording, block.class_name, repeats_collectives=True), WholeCosts.of(recording)
    if recording.data_read_at is None:
        return (recording, None) if repeats else _by_numbers(called, recording, agreement.inputs)
    costs = WholeCosts.of(recording)
    if not (costs.are_worth_it or calls_collective(recording, once_data_was_read=True)):
        return recording, None
    reason = why_not_again(recording) or _why_not_now(called, recording, agreement.inputs)
    if reason is None and repeats:
        reason = _why_not_together(called, ranks_agree)
    if reason is not None:
        return recording.remarked(f"The block is not recomputed as a whole either, since {reason}"), None
    if called.beginning is None:
        return recording.remarked(_ADVICE), None
    return as_whole(recording, block.class_name, repeats), costs


def _by_numbers(
    called: RecordedCall, recording: Recording, placement: InputPlacement
) -> tuple[Recording, WholeCosts | None]:
    """As `planned_recording`, of a block that reads no data, but may read numbers that it has put into tensors.

    Its operators may be recomputed one by one. But such numbers often follow the lengths, and then the operators are
    recorded at each length. So the block is planned as if they were data.
    """
    after = recording.numbers_read_after
    if after is None or called.beginning is None:
        return recording, None
    of_data = recording.refuse({op.index: TAINTED for op in recording.ops[after:] if op.replayable})
    costs = WholeCosts.of(of_data)
    if not costs.are_worth_it or why_not_again(recording) or _why_not_now(called, recording, placement):
        return recording, None
    return as_whole(of_data, called.incoming.block.class_name), costs


def _why_not_now(called: RecordedCall, recording: Recording, placement: InputPlacement) -> str | None:
    """Why the forward of the call must not run a second time, as far as the call itself tells."""
    incoming, watch, beginning = called.incoming, called.captured.watch, called.beginning
    if placement != InputPlacement():
        return "its inputs are to be partitioned or held on the host"
    if watch.has_seen_backward:
        return "it runs a backward in its forward"
    unwatched = watch.not_put_back or unreadable((incoming.signature, called.guards))
    if unwatched is not None:
        return f"it depends on {unwatched}, which cannot be watched"
    if has_script((incoming.signature, called.guards)):
        return "it calls TorchScript, whose optimizer may have the second forward save other tensors than the first"
    reason = _why_not_the_same(called, recording) or why_not_put_back(incoming.call.closure, recording)
    if reason is not None:
        return reason
    changed = incoming.block.effects or (None if beginning is None else _changed(called, recording, beginning))
    return None if changed is None else f"its forward changes {changed}: keep that outside of the block"


def _why_not_together(called: RecordedCall, ranks_agree: bool) -> str | None:
    """Why the ranks cannot run second forwards, with their collectives, at the same place in backward."""
    if not ranks_agree:
        return "it calls collectives, and without an engine the ranks do not agree on a plan"
    if not nodes_of(called.captured.output) - nodes_of(called.incoming.call.given):
        return "it calls collectives, and nothing in what it returns tells when its backward begins"
    return None


def _why_not_the_same(called: RecordedCall, recording: Recording) -> str | None:
    """Why a second forward of the call would draw other random numbers."""
    if called.beginning is None or all(map(called.beginning.random.has, recording.generators)):
        return None
    return "it draws from a random generator that neither its modules nor its arguments have"


def _changed(called: RecordedCall, recording: Recording, beginning: Beginning) -> str | None:
    """What the call has changed of that on which later calls depend; None: nothing that is guarded."""
    for value in recording.values:
        if value.origin == "buffer":
            now, read = recording.buffer(value), called.captured.tensors[value.index]
            if now is None or now.data_ptr() != read.data_ptr():
                return f"which tensor {value.label or value.name} is"
    block, call = called.incoming.block, called.incoming.call
    if flatten((call.run.args, call.run.keywords), [], []) != called.arguments:
        return "an argument"
    if (inside := beginning.changed()) is not None:
        return inside
    if beginning.reached.is_changed():
        return "a variable around it"
    try:
        reading, _ = call.closure.read(marks_of(block.places), block.last_reading)
    except UnreadableModule:
        return "a module that it holds"
    # A second forward is taken to make the same of what has only come, such as a cache that is filled once.
    changed = rewritten(called.guards, reading.marks)
    return in_short(changed) if changed else None
