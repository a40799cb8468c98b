"""The program of a block while it is being recorded: what has been written down of it so far."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ds_adacc.program.arguments import ParameterRef, ValueRef, tensors_in
from ds_adacc.program.geometry import Geometry, storage_of, why_not_plain
from ds_adacc.program.parameters import Parameters
from ds_adacc.program.recorded_op import RecordedOp
from ds_adacc.program.recording import Position, Recording
from ds_adacc.program.refusals import (
    COMPILED,
    PARAMETRIZED,
    STATISTICS,
    TAINTED,
    UNINITIALISED,
    UNSEEN,
    WRITTEN,
    is_of_torch,
    refusal_of,
)
from ds_adacc.program.schema import MASKS, by_look, updated_statistics, written_values
from ds_adacc.record.backward_nodes import BackwardNodes
from ds_adacc.record.block_call import BlockCall
from ds_adacc.record.compiled_kernels import KERNEL, CompiledCode, in_compiled_code
from ds_adacc.record.executed_call import ExecutedCall
from ds_adacc.record.known_tensors import KnownTensors, Unrecordable, require_plain
from ds_adacc.record.lifetimes import Lifetimes
from ds_adacc.record.naming.labels import Labels
from ds_adacc.record.replayable.draws import Draws
from ds_adacc.record.replayable.late_refusals import extra_refusals, readers_of_changed
from ds_adacc.record.replayable.taint import Taint

_WROTE_UNSEEN = (
    "a kernel that PyTorch does not see wrote to a tensor: neither what the tensor held before nor what it holds now "
    "is recomputed. If you can, launch the kernel within an autograd.Function or an operator of torch.library"
)
_OVERWRITTEN = "what it makes is overwritten in place"


class Draft:
    """Operators, values, saved tensors and remarks, in the order in which the recorder tells of them.

    `known` has the values, `draws` the random generators' states, `nodes` autograd's, `lifetimes` those of all results,
    `taint` what Python has read of data, `compiled` what of torch.compile's code has run.
    """

    def __init__(self, call: BlockCall) -> None:
        self.known = KnownTensors(call.inputs, call.closure)
        self.labels = Labels(call.inputs, call.closure)
        self.draws = Draws(call.closure.generators(), self.known.values, self.known.tensors)
        self.nodes = BackwardNodes()
        self._closure = call.closure
        self._inner = list(map(storage_of, call.inner))  # of the tensors in objects among the block's arguments
        self.ops: list[RecordedOp] = []  # what has run so far
        self.positions: list[Position] = []  # what autograd has saved so far
        self.taint = Taint(self.ops, self.positions)
        self.compiled = CompiledCode(self.positions)
        self.lifetimes = Lifetimes(self.ops)
        self._detached: set[int] = set()  # the operators that seem to be, and write nothing
        self._early: list[int] = []  # the positions that were saved for an operator that has not been noted yet
        self._remarks: dict[str, None] = {}
        self._masks: set[int] = set()
        self._statistics: list[torch.Tensor] = []  # the buffers that batch norms have updated
        self._changed: dict[int, str] = {}  # by parameter that the forward changes: why its readers are not replayed
        self._saved_parameters: list[tuple[int, int, int]] = []  # of each: the position, its index, the version
        self.has_hooks = False  # whether hooks wait for the gradients of its tensors
        self._seen: set[int] = set()  # the values that an operator has read, or autograd has saved
        self.known.tensors.rebuild_from(self.known.values, self.ops, self.known.parameters)

    def recording(self, name: str) -> Recording:
        """The whole program."""
        known = self.known
        self.record_unseen_writes(None)
        self._check_saved_parameters()
        data_read_at = self.taint.data_read_at if any(op.refusal == TAINTED for op in self.ops) else None
        if data_read_at is not None:
            self.remark(
                f"{data_read_at} reads data into Python, or makes a shape that depends on data: nothing after it "
                "is recomputed. If you can, compute it outside of the block and pass it as an argument"
            )
        met = {id(parameter) for parameter in known.parameters}
        others = (parameter for parameter in dict.fromkeys(self._closure.parameters) if id(parameter) not in met)
        recording = Recording(
            name=name,
            values=tuple(known.with_lifetimes(self.lifetimes)),
            ops=tuple(self.ops),
            positions=tuple(self.positions),
            parameters=Parameters((*known.parameters, *others)),
            buffers=tuple(known.buffers),
            remarks=tuple(self._remarks),
            has_hooks=self.has_hooks,
            compiled_from=self.compiled.began_at,
            data_read_at=data_read_at,
            numbers_read_after=self.taint.numbers_read_after,
        )
        doubtful = extra_refusals(recording, self.taint.first_doubtful, self._masks)
        changed = readers_of_changed(self.ops, known, self._statistics, self._changed)
        return recording.refuse({**doubtful, **changed, **self.draws.refusals()})

    def _check_saved_parameters(self) -> None:
        """Raises `Unrecordable` if autograd counts a write to a parameter that it has saved, or to what has its memory.

        `.data` has a version of its own: autograd takes it for another tensor.
        """
        for position, index, version in self._saved_parameters:
            is_written = self._changed.get(index) == WRITTEN and self.known.counts(index)
            is_needed = is_written and not self.positions[position].discarded
            if is_needed and self.known.parameters[index]._version != version:
                raise Unrecordable("it saves a parameter for backward and writes to it in place")

    def note_own_memory(self, tensor: torch.Tensor) -> bool:
        """Note that a tensor was given the memory that it had. Returns whether that is all, as for a parameter."""
        found = self.known.find(tensor)
        if isinstance(found, ParameterRef):
            self._changed.setdefault(found.index, PARAMETRIZED)
        return isinstance(found, ParameterRef)

    def note_number(self, tensor: torch.Tensor, is_doubtful: bool) -> None:
        """Note a tensor that torch has just made of a number. `is_doubtful`: as of `MadeOfNumbers.add`."""
        if not self.note_compiled() and self.known.find(tensor) is None:
            self.taint.numbers.add(self.known.captured(tensor).index, tensor, is_doubtful=is_doubtful)

    def note_read(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note that Python reads these tensors, which tells it of data unless they were made of numbers alone."""
        self.taint.note_read(map(self.known.find, tensors))

    def encode(self, tree: Any) -> Any:
        """`tree` with a reference to a value or a parameter in place of each tensor."""
        if isinstance(tree, torch.Tensor):
            return self._refer(tree)
        if isinstance(tree, tuple | list):
            return type(tree)(self.encode(item) for item in tree)
        return tree

    def note(self, ran: ExecutedCall) -> RecordedOp | None:
        """Note a call that has run. Returns its operator, or None if it has made nothing."""
        made_of = self.taint.numbers.computed(ran)
        if made_of is not None:
            for tensor in tensors_in(ran.outputs):
                self.taint.numbers.add(self.known.captured(tensor).index, tensor, made_of)
            return None
        bases = self.bases(ran.written)
        op = self._operator(ran, bases)
        if ran.dynamic:
            self._masks.update(r.index for r in op.references if r.geometry.dtype in MASKS and type(r) is ValueRef)
        dynamic = ran.dynamic or any(self.known.values[value].dynamic for value in op.reads)
        rewritten, parameters = list[int](), set[int]()
        for tensor in ran.written:
            own = self.known.parameters_in(tensor)
            parameters |= own
            if not own or self.known.in_storage(tensor) or not is_of_torch(ran.func):
                rewritten += self.known.overwritten(tensor, op, len(ran.outputs) + len(rewritten))
        self._changed.update(dict.fromkeys(parameters, WRITTEN))
        if refusal_of(ran.func) == STATISTICS:
            self.known.accept_changes(ran.given)
            self._statistics += updated_statistics(ran.func, ran.given[0])
        given = {storage_of(tensor) for tensor in tensors_in(ran.given)}
        made = [self._made(ran, op, output, dynamic, given) for output in range(len(ran.outputs))]
        if not (rewritten or parameters) and all(value is None for value in made):
            return None  # Rule R3: a view, which its geometry describes, or only Python numbers
        for base in bases.values():
            self.ops[base.index] = replace(base, refusal=base.refusal or _OVERWRITTEN)
        if parameters:
            op = replace(op, refusal=WRITTEN)
            self.remark(f"{op.short_name} writes to a parameter in the forward: what reads that is never recomputed")
        op = self._append(replace(_settled(op, ran.outputs[0], dynamic), outputs=(*made, *rewritten)))
        self._seen.update(op.reads)
        if not ran.written:
            self.taint.numbers.note(op)
        if op.draw is not None:
            self.draws.add(op.index, op.draw)
        return op

    def _operator(self, ran: ExecutedCall, bases: Mapping[int, RecordedOp]) -> RecordedOp:
        """The operator of a call, as far as it is known without its outputs."""
        draw, unknown = self.draws.of(ran.given, ran.states)
        return RecordedOp(
            index=len(self.ops),
            func=ran.func,
            args=ran.args,
            kwargs=ran.kwargs,
            outputs=(),
            refusal=ran.refusal or unknown,
            draw=draw,
            bases=tuple(bases.values()),
            written=tuple(bases),
            python_reads=ran.python_reads,
            detached=ran.detached,
        )

    def note_gradients(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note which of these have a gradient. So the operators that have made them are not detached.

        They seemed so in the forward of a Function in C++, where gradients are off, and before `.data` was assigned.
        """
        if not self._detached:  # as in most blocks: nothing is looked up then
            return
        given = (each for each in tensors if each.requires_grad and why_not_plain(each) is None)
        makers = {self.known.values[index].producer for tensor in given for index in self.known.in_storage(tensor)}
        for index in self._detached.intersection(makers):
            self.ops[index] = replace(self.ops[index], detached=None)
            self._detached.discard(index)

    def _append(self, op: RecordedOp) -> RecordedOp:
        self.labels.note()
        self.ops.append(op)
        if op.detached and not written_values(op):
            self._detached.add(op.index)
        return op

    def note_cached(self, ops: Iterable[int]) -> None:
        """Note that autocast keeps what these operators have made, casts of weights, until its context ends."""
        for index in ops:
            self.ops[index] = replace(self.ops[index], cached=True)

    def refuse_last(self, reason: str) -> None:
        """The last operator is not replayed."""
        self.ops[-1] = replace(self.ops[-1], refusal=reason)

    def save(self, tensor: torch.Tensor, states: Sequence[torch.Tensor], function: RecordedOp | None = None) -> None:
        """Note a tensor that autograd saves; `states` are the random generators' then.

        A `function` saves before it has made its outputs.
        """
        if function is None:
            self.note_compiled()
            self.record_unseen_writes((tensor,))
        self.draws.mark(states)
        plannable = tensor.numel() > 0 and not (tensor.is_conj() or tensor.is_neg())
        ref = self._refer(tensor) if plannable else None
        op = self.nodes.saver(tensor, len(self.ops)) if function is None else function.index
        if op == len(self.ops):
            self._early.append(len(self.positions))
        if isinstance(ref, ParameterRef):
            self._saved_parameters.append((len(self.positions), ref.index, tensor._version))
        self.positions.append(Position(ref, op))
        if isinstance(ref, ValueRef):
            self._seen.add(ref.index)
            self.known.tensors.hold(ref.index)

    def note_call(self, began: int, op: RecordedOp | None, written: Sequence[torch.Tensor]) -> None:
        """Note which operator a call of the dispatcher's has become, as of `BackwardNodes.note`.

        It is the one for which autograd has saved tensors before it ran. Meanwhile others may have been put before it.
        """
        self.nodes.note(began, op, written)
        for position in self._early:
            self.positions[position] = replace(self.positions[position], op=len(self.ops) if op is None else op.index)
        self._early = []

    def discard(self, positions: Mapping[int, int]) -> None:
        """Rule R18: autograd has discarded what it saved at these positions. No plan is made for it, so it may die.

        By position, how many operators had run by then. Where data decide which branch runs, another call may keep it.
        """
        if self.taint.first_doubtful is not None:
            return
        for number, ops_done in positions.items():
            self.positions[number] = replace(self.positions[number], discarded_after=ops_done)
        values = [(p.ref.index, p.discarded) for p in self.positions if isinstance(p.ref, ValueRef)]
        kept = {index for index, is_discarded in values if not is_discarded}
        for index in {index for index, _ in values} - kept:
            producer = self.known.values[index].producer
            if producer is not None and self.ops[producer].replayable and self.ops[producer].draw is None:
                self.known.tensors.release([index])

    def remark(self, remark: str) -> None:
        """A line for the plan's table; an empty one is left out."""
        if remark:
            self._remarks[remark] = None

    def note_compiled(self) -> bool:
        """Whether compiled code runs now, and no graph of it tells whether later calls run the same (Rule R17)."""
        is_unknown = self.compiled.runs_unknown()
        if is_unknown:
            self.taint.doubt_from_here()
        return is_unknown

    def record_unseen_writes(self, given: Any) -> None:
        """Add an operator for each storage to which something wrote unseen (Rule R19).

        `given`: the arguments to look at; None: look at all values.
        """
        for tensor in self.known.written_unseen(given):
            self.record_write(tensor)
            self.remark(_WROTE_UNSEEN)

    def record_write(self, tensor: torch.Tensor) -> None:
        """Add an operator for a write to this tensor of which the dispatcher does not tell."""
        self._refer(tensor)  # nobody may have met it yet
        op = RecordedOp(len(self.ops), KERNEL, (), (), (), UNSEEN)
        self._append(replace(op, outputs=tuple(self.known.overwritten(tensor, op, 0))))

    def bases(self, written: Sequence[torch.Tensor]) -> dict[int, RecordedOp]:
        """By value, what made the tensors that are written to, if no one has read any of them yet (Rule R4)."""
        bases = {}
        for tensor in written:
            values = self.known.in_storage(tensor)
            producer = self.known.values[values[0]].producer if len(values) == 1 else None
            if producer is None or self.ops[producer].refusal not in (None, UNINITIALISED):
                return {}
            if values[0] in self._seen or values[0] in bases:
                return {}
            bases[values[0]] = self.ops[producer]
        return bases

    def _made(self, ran: ExecutedCall, op: RecordedOp, output: int, dynamic: bool, given: set[int]) -> int | None:
        """A new value for an operator's output; None if it is no tensor, or a view of an argument (Rule R3).

        Of what a Function saves, None also if it is empty, or (part of) a value. A generator's state is no output (Rule
        R16).
        """
        tensor, is_saved = ran.outputs[output], output >= len(ran.outputs) - ran.saved
        if not isinstance(tensor, torch.Tensor):
            return None
        require_plain(tensor)
        if storage_of(tensor) in given:
            return None
        if is_saved and (tensor.numel() == 0 or self.known.find(tensor) is not None):
            return None
        if output in ran.handed_on:
            self.known.handed_on(tensor, op, output)
            return None
        return self.known.made(tensor, op, output, dynamic)

    def _refer(self, tensor: torch.Tensor) -> ValueRef | ParameterRef:
        found = self.known.find(tensor)
        if found is not None:
            return found
        is_unseen = storage_of(tensor) not in self._inner and in_compiled_code()
        return self._made_unseen(tensor) if is_unseen else self.known.captured(tensor)

    def _made_unseen(self, tensor: torch.Tensor) -> ValueRef:
        """A new value for a tensor that a compiled kernel made, unseen by the dispatcher."""
        op = self._append(RecordedOp(len(self.ops), KERNEL, (), (), (len(self.known.values),), COMPILED))
        return ValueRef(self.known.made(tensor, op, 0), Geometry.of(tensor))


def _settled(op: RecordedOp, made: Any, dynamic: bool) -> RecordedOp:
    """The operator with what its first output tells. `dynamic`: data decides the shapes of its outputs."""
    if op.refusal == UNINITIALISED and not dynamic:  # else the digest would have a size that data decides
        op = by_look(op, made)
    is_otherwise_fine = op.refusal in (None, UNINITIALISED)
    return replace(op, refusal="its shape depends on data") if dynamic and is_otherwise_fine else op
