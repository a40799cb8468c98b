"""What a recording consists of: values, operators, and the positions at which autograd saves a tensor."""

from __future__ import annotations

import copy
import functools
import hashlib
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ds_adacc import planner
from ds_adacc.program.arguments import CONSTANTS, ParameterRef, ValueRef, extract_numbers, generators_in, without_data
from ds_adacc.program.backward_graph import BackwardGraph
from ds_adacc.program.geometry import Geometry
from ds_adacc.program.graphs import GraphRun, numbers_in
from ds_adacc.program.parameters import whole_shape
from ds_adacc.program.recorded_op import Draw, RecordedOp, WholeBlock
from ds_adacc.program.refusals import COMPILED
from ds_adacc.program.with_gradient import values_with_gradient
from ds_adacc.python_state.guard_history import as_clause
from ds_adacc.python_state.held_tensors import Path, tensor_at


@dataclass(frozen=True)
class RecordedValue:
    """The content of one storage at one time (Rules R3 and R4).

    `origin`: "made" by an operator of the block, "input" (an argument), "buffer" (a tensor of the block's modules),
    "generator" (the state of a random generator, on the host), "state" (one that attention hands to its backward: Rule
    R16) or "captured" (from elsewhere). `producer` is the operator that made it, and `output` which of its outputs it
    is; `source` is the number of the argument or buffer.
    `channels`: the length of its last dimension, as the operators that read it see it. `overwritten`: written to in
    place later on. `dynamic`: its shape depends on data.
    `two_valued`: at most two values in every call. `moderate`: its data has no Inf, and no mask is known to bring
    one, or a huge number, in another call. `device`: the type of its device. `is_parameter`: an argument that is an
    `nn.Parameter` or a view of one.
    `label` is what the user would call it (labels.py); `name` is made of ATen's operators.
    `pinned`: the program, or another call, holds it until backward, whatever the plan.
    `alive_until`: the last operator to run while the program keeps it in forward, whatever the plan; -1 if that was not
    seen.
    """

    index: int
    name: str
    origin: str
    geometry: Geometry
    producer: int | None = None
    output: int = 0
    source: int = 0
    channels: int = 1
    requires_grad: bool = False
    overwritten: bool = False
    dynamic: bool = False
    two_valued: bool = False
    moderate: bool = True
    role: str = "other"
    device: str = "cpu"
    is_parameter: bool = False
    label: str = ""
    pinned: bool = False
    alive_until: int = -1

    @property
    def nbytes(self) -> int:
        return self.geometry.span

    @property
    def is_given(self) -> bool:
        """Whether it is there before the forward begins, and the call knows it."""
        return self.origin in ("input", "buffer")

    @property
    def owned(self) -> bool:
        """Whether dropping the value frees memory of its device.

        An input without gradient (a mask) stays with the caller anyway, and a parameter with its model. A CUDA
        generator's state is in host memory.
        """
        if self.pinned:
            return False
        if self.origin == "generator":
            return self.device == "cpu"
        return self.origin == "made" or self.may_be_shared

    @property
    def may_be_shared(self) -> bool:
        """Whether it is an input that several calls may hold: it counts in one of them only."""
        return self.origin == "input" and self.requires_grad and not self.is_parameter


@dataclass(frozen=True)
class Position:
    """One call of the pack hook: what autograd saves.

    `ref` is None if the plan cannot know the tensor (a conjugate view, say): every call retains it.
    `op`: the operator whose backward asks for it. One more than the last operator if only a view came after that.
    `discarded_after`: it was saved for an output that the block has discarded, when so many operators had run (Rule
    R18). Every call retains it until then. One that does not discard it retains it longer, and no plan counts that.
    None: backward may ask for it.
    """

    ref: ValueRef | ParameterRef | None
    op: int
    discarded_after: int | None = None

    @property
    def discarded(self) -> bool:
        """Whether it was saved for an output that the block has discarded."""
        return self.discarded_after is not None

    @property
    def value(self) -> int | None:
        """The index of the value that is saved for backward, and that a plan may know here."""
        return self.ref.index if isinstance(self.ref, ValueRef) and not self.discarded else None


@dataclass(frozen=True)
class Recording:
    """One block's program. Its only tensors are parameters (Rule R12).

    `buffers`: the owner of each, which the recording does not keep alive, and the steps from there. `remarks`: what
    the user should know of its Functions, and of data that Python reads. `has_hooks`: hooks wait for the gradients of
    its tensors.
    `compiled_from`: the first position that code of torch.compile may have saved; None: none runs. `loses_graphs`: what
    the block returns does not tell which of its graphs have run. `data_read_at`: the first line that reads data, if
    any operator follows it; such an operator is not replayed (Rule R7). `numbers_read_after`: how many operators have
    run when Python first reads a tensor that was made of numbers alone; None: it reads none. `backward`: the graph
    along which its backward runs.
    """

    name: str
    values: tuple[RecordedValue, ...]
    ops: tuple[RecordedOp, ...]
    positions: tuple[Position, ...]
    parameters: Sequence[torch.Tensor] = field(repr=False)
    buffers: tuple[tuple[weakref.ref[Any], Path], ...] = field(repr=False)
    remarks: tuple[str, ...] = ()
    has_hooks: bool = False
    compiled_from: int | None = None
    loses_graphs: bool = False
    data_read_at: str | None = None
    numbers_read_after: int | None = None
    backward: BackwardGraph = field(default_factory=BackwardGraph, repr=False)

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the program's structure: blocks with the same digest share a profile and a policy.

        Constants are left out: each block may have its own drop-path rate or layer number, and replays with that.
        Rule R12: it leaves out what differs between ranks, which is device numbers and what data decides.
        """
        dynamic = frozenset(value.index for value in self.values if value.dynamic)
        values = [_structure(value) for value in self.values]
        ops = [without_data(_portable(op), dynamic) for op in self.ops]
        positions = [
            (without_data(p.ref, dynamic), p.op, *(["discarded"] if p.discarded else [])) for p in self.positions
        ]
        more = (
            self.backward.structure,
            *(["hooks"] if self.has_hooks else []),
            *([self.compiled_from] if self.runs_compiled else []),
        )
        text = repr((values, ops, positions, *more))
        looks = [(whole_shape(p), p.dtype, p.requires_grad) for p in self.parameters]
        return hashlib.sha256(f"{text}{looks}".encode()).hexdigest()[:16]

    @functools.cached_property
    def graph_ops(self) -> tuple[RecordedOp, ...]:
        """The operators that are graphs of torch.compile, in the order in which they run (Rule R17)."""
        return tuple(op for op in self.ops if op.is_graph)

    @functools.cached_property
    def graphs(self) -> tuple[GraphRun, ...]:
        """The calls of `graph_ops`."""
        return tuple(GraphRun(op.func.cls, numbers_in(op.args)) for op in self.graph_ops)

    @functools.cached_property
    def hides_compiled(self) -> bool:
        """Whether compiled code runs in the block that is no operator, and that no graph tells of."""
        return any(op.refusal == COMPILED for op in self.ops)

    @property
    def runs_compiled(self) -> bool:
        """Whether compiled code runs in the block."""
        return self.compiled_from is not None

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether the block is one operator, which only a second forward runs again (Rule R20)."""
        return any(isinstance(op.func, WholeBlock) for op in self.ops)

    @functools.cached_property
    def repeats_collectives(self) -> bool:
        """Whether it is whole, and its second forward calls collectives (Rule T8)."""
        return any(isinstance(op.func, WholeBlock) and op.func.repeats_collectives for op in self.ops)

    @property
    def written_buffers(self) -> list[tuple[weakref.ref[Any], Path]]:
        """Those of `buffers` that the block writes to, if it is whole."""
        whole = (op.func for op in self.ops if isinstance(op.func, WholeBlock))
        return [self.buffers[place] for func in whole for place in func.writes_to]

    @property
    def remarks_on_replays(self) -> tuple[str, ...]:
        """Why the plan has less to choose from in this block than the user may expect, each thing once."""
        refused = (f"{op.short_name}: never replayed: {op.refusal}" for op in self.ops if op.is_function and op.refusal)
        return tuple(dict.fromkeys((*refused, *self.remarks)))

    @functools.cached_property
    def inputs(self) -> tuple[RecordedValue, ...]:
        """The values that are arguments of the block."""
        return tuple(value for value in self.values if value.origin == "input")

    @functools.cached_property
    def with_gradient(self) -> frozenset[int]:
        """The values that get a gradient in backward."""
        given = {value.index for value in self.inputs if value.requires_grad}
        numbers = (v for v in self.values if v.geometry.dtype.is_floating_point or v.geometry.dtype.is_complex)
        return values_with_gradient(self.ops, given, {value.index for value in numbers if value.role != "statistic"})

    @functools.cached_property
    def held_inputs(self) -> tuple[int, ...]:
        """The places of the inputs, of any size, that a call may hold: autograd saves them, or a replay reads them."""
        held = self.saved.union(self.segments.readers)
        return tuple(sorted({value.source for value in self.inputs if value.index in held}))

    @functools.cached_property
    def unsaved_inputs(self) -> frozenset[int]:
        """The places of those `held_inputs` that autograd does not save."""
        return frozenset(self.held_inputs) - {value.source for value in self.inputs if value.index in self.saved}

    @functools.cached_property
    def saved_and_held_before(self) -> tuple[int, ...]:
        """The places of the inputs that autograd saves, and an earlier call holds."""
        return tuple(sorted({value.source for value in self.inputs if value.pinned and value.index in self.saved}))

    @functools.cached_property
    def saved(self) -> frozenset[int]:
        """Values that autograd saves and does not discard."""
        return frozenset(p.value for p in self.positions if p.value is not None)

    @functools.cached_property
    def storable(self) -> frozenset[int]:
        """Values that a call can hold: it sees what autograd saves, and what is there before the forward."""
        given = (value.index for value in self.values if value.is_given or value.origin == "generator")
        return self.saved.union(given)

    @functools.cached_property
    def segments(self) -> planner.Segments:
        """What backward may replay of it, and which operators together."""
        return planner.Segments([op.of_planner for op in self.ops], self.storable, self.saved)

    @functools.cached_property
    def constants(self) -> tuple[float, ...]:
        """The numbers that the operators compute with, in order."""
        found: list[float] = []
        extract_numbers(CONSTANTS, tuple((op.args, op.kwargs) for op in self.ops), found)
        return tuple(found)

    @property
    def draws(self) -> tuple[Draw, ...]:
        """The draws of the operators that may be replayed."""
        return tuple(draw for op in self.ops if op.replayable for draw in op.draws)

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """The generators that were passed to operators."""
        return tuple(generators_in([(op.args, op.kwargs) for op in self.ops]))

    def buffer(self, value: RecordedValue) -> torch.Tensor | None:
        """What the block has now as the buffer that this value is; None if it has none."""
        owner, path = self.buffers[value.source]
        return tensor_at(owner(), path)

    def read_buffers(self) -> dict[int, torch.Tensor]:
        """The buffers that the block has now, by value."""
        values = (value for value in self.values if value.origin == "buffer")
        return {value.index: found for value in values if (found := self.buffer(value)) is not None}

    def refuse(self, reasons: dict[int, str]) -> Recording:
        """This recording with the operators in `reasons` (reason by index) marked as never replayed.

        What is replayed together with such an operator is not replayed either.
        """
        ops = []
        for op in self.ops:
            found = (reasons[part.index] for part in reversed(op.parts) if part.index in reasons)
            ops.append(replace(op, refusal=op.refusal or next(found, None)))
        return replace(self, ops=tuple(ops))

    def of_type(self) -> Recording:
        """The recording as that of a block type: with the looks of the parameters, without those of any one block."""
        looks = (
            torch.empty(whole_shape(p), dtype=p.dtype, device="meta", requires_grad=p.requires_grad)
            for p in self.parameters
        )
        return self.of_block(self.name, tuple(looks), ())

    def of_block(
        self, name: str, parameters: Sequence[torch.Tensor], buffers: Sequence[tuple[weakref.ref[Any], Path]]
    ) -> Recording:
        """This program as another block runs it, whose parameters look alike.

        What was worked out of the program stays known: it takes milliseconds, and none of it depends on these fields.
        """
        twin = copy.copy(self)
        vars(twin).update(name=name, parameters=parameters, buffers=tuple(buffers))
        return twin

    def with_held_before(self, places: Collection[int]) -> Recording:
        """This recording, whose inputs at these places an earlier call of the same forward holds: they count there."""
        held = {value.index for value in self.inputs if value.source in places and not value.pinned}
        if not held:
            return self
        return replace(self, values=tuple(replace(v, pinned=True) if v.index in held else v for v in self.values))

    def was_predicted_with(self, other: Recording) -> bool:
        """Whether both are one prediction for a size: they differ in the block, its constants and Functions."""
        return self.digest == other.digest and self.values is other.values and self.positions is other.positions

    def remarked(self, remark: str) -> Recording:
        """This recording, with one more remark for the plan's table."""
        return replace(self, remarks=(*self.remarks, remark))

    def doubted(self, doubt: str) -> Recording:
        """This recording, of which nothing is replayed if there is a `doubt`: its program may be another next time."""
        if not doubt or self.is_whole:  # a second forward runs whatever the block runs
            return self
        remark = f"it depends on {as_clause(doubt)}: nothing of it is recomputed"
        refused = self.refuse(dict.fromkeys(range(len(self.ops)), f"it may follow {doubt}"))
        return replace(refused, remarks=(remark, *self.remarks))


def _portable(op: RecordedOp) -> tuple[Any, ...]:
    draw = None if op.draw is None else (op.draw.position, op.draw.before.index, op.draw.after.index)
    flags = op.detached, *(["cached"] if op.cached else [])
    return (op.name, op.args, op.kwargs, op.outputs, op.refusal is None, draw, *flags)


def _structure(value: RecordedValue) -> tuple[Any, ...]:
    """The role is left out: it follows from the program, except for that of a mask, which its data decides.

    So is the label: blocks that differ in nothing but their modules' names are of one type.
    """
    layout = None if value.dynamic else (value.geometry, value.channels)
    # Whether an input counts; of what the program makes, that follows from the program.
    is_held = value.pinned and value.origin == "input"
    flags = value.requires_grad, value.overwritten, value.dynamic, *(["held"] if is_held else [])
    return value.index, value.name, value.origin, layout, value.producer, value.output, value.source, flags
