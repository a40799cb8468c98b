"""Watch one forward of a block: write down its operators and the tensors that autograd saves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_adacc.program.functions import as_tuple, attributes, by_position, why_not_one
from ds_adacc.program.generators import unmoved
from ds_adacc.program.geometry import Geometry
from ds_adacc.program.parameters import Parameters
from ds_adacc.program.recording import (
    COLLECTIVE,
    COMPILED,
    UNINITIALISED,
    ParameterRef,
    Position,
    RecordedOp,
    Recording,
    ValueRef,
)
from ds_adacc.program.registration import registration_of
from ds_adacc.program.schema import (
    MASKS,
    OF_TORCH,
    OPAQUE,
    by_look,
    generator_states,
    generators_in,
    has_dynamic_shape,
    refusal_of,
    reveals_data,
    tensors_in,
    with_constants,
    with_dtype,
    written_tensors,
)
from ds_adacc.python_state.closure import Closure
from ds_adacc.python_state.guards import holds
from ds_adacc.python_state.python_reads import PythonReads, places_of_kernels
from ds_adacc.python_state.watch import Place, Watch
from ds_adacc.record.application import Application
from ds_adacc.record.compiled import KERNEL, in_compiled_code
from ds_adacc.record.draws import Draws
from ds_adacc.record.known import Known, Unrecordable, admit, storage_of
from ds_adacc.record.labels import Labels
from ds_adacc.record.ran import Ran
from ds_adacc.record.verify import difference, unsure

_OVERWRITTEN = "what it makes is overwritten in place"


class Recorder(TorchDispatchMode):
    """The dispatch mode and pack hook of one recorded forward, and what the watch tells of Python's calls.

    `known` has the values seen, and `saved` what autograd saves, in order. Each operator is verified as soon as it has
    run, so that its results may die as they do without a recorder (Rule 2). After a call that it cannot record it only
    passes calls on; `failure` says why.

    torch.compile's code runs compiled, as it will in later calls. The dispatcher does not see all of its kernels, and
    it may be compiled anew for the same arguments, so nothing of it is replayed (Rule 6).
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Torch asks here whether compiled code may run compiled under this mode."""
        return True

    def __init__(self, name: str, inputs: Sequence[torch.Tensor], found: Closure) -> None:
        super().__init__()
        self.name = name
        self.labels = Labels(inputs, found)
        self.failure: str | None = None
        self.saved: list[torch.Tensor] = []
        self.known = Known(inputs, found)
        self._closure = found
        self._ops: list[RecordedOp] = []
        self._positions: list[Position] = []
        self._turn: int | None = None
        self._masks: set[int] = set()
        self._tainted = False
        self._is_aside = False  # while it runs operators of its own
        self._fresh = False
        self._has_collective = False  # of the call that is under way
        self._python_reads: PythonReads | None = None  # of the operator that is under way, if its kernel may be Python
        self._running: Application | None = None
        self._remarks: dict[str, None] = {}
        self._seen: set[int] = set()  # the values that an operator has read, or autograd has saved
        self._draws = Draws(found.generators(), self.known.values, self.known.tensors)
        self.known.tensors.rebuild_from(self.known.values, self._ops, self.known.parameters)
        self.watch = Watch(self)

    # -- what torch calls

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.failure is not None or self._is_aside:
            return func(*args, **kwargs)
        if self._running is not None:
            result = func(*args, **kwargs)
            with self._noting():
                self._running.note(func, (args, kwargs), result)
            return result
        encoded = states = None
        with self._noting():
            encoded = self._arguments(func, args, kwargs)
            states = self._draws.states()
            if getattr(func, "namespace", None) not in OF_TORCH:
                self._python_reads = PythonReads(places_of_kernels(func))
                self.watch.add(self._python_reads.places)
        self._has_collective = False
        try:
            result = func(*args, **kwargs)
        finally:
            reads, self._python_reads = self._python_reads, None
        if self.failure is None:
            with self._noting():
                self._note(self._ran(func, encoded, (args, kwargs), result, states, reads))
        return result

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note one saved tensor. Returns an alias of it that is not part of the autograd graph."""
        with torch.no_grad(), self.aside():
            tensor = tensor.detach()
        self.saved.append(tensor)
        if self._running is not None:  # the Function's outputs are not known yet
            self._running.packed.append((tensor, self._draws.states()))
        elif self.failure is None:
            with self._noting(), self.aside():
                self._save(tensor, self._draws.states(), len(self._ops), self._fresh)
        return tensor

    def note_read(self) -> None:
        """Note that Python reads data of which the dispatcher is not told (Rule 7)."""
        self._tainted = True
        self._doubt_from_here()
        if self._running is not None:
            self._running.refuse("reads data into Python")

    def note_collective(self) -> None:
        """Note that a collective is called, which the dispatcher does not tell of inside a custom operator."""
        self._has_collective = True

    def note_places(self, places: Mapping[str, Place]) -> None:
        """Note what a function reads that begins inside a Function, or in the kernel of an operator."""
        reads = self._python_reads if self._running is None else self._running.python_reads
        if reads is not None:
            reads.note(places)

    def function_begins(
        self, cls: type[torch.autograd.Function], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> bool:
        """An `autograd.Function` is applied; False if its operators are to be recorded one by one (Rule 15)."""
        if self.failure is not None or self._is_aside or in_compiled_code():
            return False
        if self._python_reads is not None or registration_of(cls).replay == "operators":
            return False  # within an operator's kernel it is a part of that
        args = by_position(cls, args, kwargs)
        reason = why_not_one(cls, args, self._is_guarded)
        if reason is not None:
            self._remark(reason and f"{cls.__name__}: {reason}, so its operators are recorded one by one")
            return False
        with self._noting(), self.aside(), torch.no_grad():
            self._running, self._has_collective = Application(cls, args, self._draws.states()), False
            self.watch.add(self._running.python_reads.places)
            if registration_of(cls).replay == "never":
                self._running.refuse("it is registered as never to be replayed")
        return self._running is not None

    def function_ends(self, result: Any, raised: bool) -> None:
        """The Function has returned, or raised an error."""
        running, self._running = self._running, None
        assert running is not None
        if self.failure is not None:
            return
        with self._noting(), self.aside(), torch.no_grad():
            results = as_tuple(result)
            index = len(self._ops)
            written = running.settle(results)
            if raised:
                running.refuse("it has raised an error")
            if written and not self._bases(written):
                running.refuse("it writes to an argument in place")
            if self._tainted:
                running.refuse("may hold a number read from data")
            if running.reads_data:
                self.note_read()
            if self._has_collective:
                running.refusal = COLLECTIVE
            self._note(running.ran(results, written, self._encode))
            at, fresh = (len(self._ops), self._fresh) if len(self._ops) == index else (index, False)
            for tensor, states in running.packed:
                self._save(tensor, states, at, fresh)
            self._note_attributes(running, results)

    # -- the result

    def recording(self) -> Recording:
        """The block's program. Raises `Unrecordable` with the reason if there is none."""
        if self.failure is not None:
            raise Unrecordable(self.failure)
        known = self.known
        met = {id(parameter) for parameter in known.parameters}
        others = (parameter for parameter in dict.fromkeys(self._closure.parameters) if id(parameter) not in met)
        recording = Recording(
            self.name,
            tuple(known.values),
            tuple(self._ops),
            tuple(self._positions),
            Parameters((*known.parameters, *others), self._closure.tensors),
            tuple(known.buffers),
            tuple(self._remarks),
        )
        return recording.refuse({**unsure(recording, self._turn, self._masks), **self._draws.refusals()})

    # -- bookkeeping

    def _is_guarded(self, thing: Any) -> bool:
        """Whether the block's guards notice when something else takes its place."""
        return holds(self._closure.state({}, last=None).marks, thing) or holds(self.watch.marks, thing)

    def _ran(
        self, func: Any, encoded: tuple[Any, Any], given: tuple[Any, Any], result: Any, states: Any, reads: Any
    ) -> Ran:
        """A call of the dispatcher's. `reads`: what its kernel has read of Python."""
        outputs = result if isinstance(result, tuple | list) else (result,)
        written = written_tensors(func, given)
        refusal = refusal_of(func, self._tainted, not written or bool(self._bases(written)))
        refusal = COMPILED if self._note_compiled() else COLLECTIVE if self._has_collective else refusal
        changed = None if reads is None else reads.changed()
        if changed is not None:
            refusal = refusal or f"it keeps state: {changed} changes"
            self._remark(f"{func}: never replayed: {refusal}")
        if not self._tainted and reveals_data(func, given, outputs):
            self._tainted = True
            self._doubt_from_here()
        dynamic, handed_on = has_dynamic_shape(func, given), generator_states(func, outputs)
        return Ran(func, *encoded, given, outputs, states, written, refusal, dynamic, 0, handed_on, reads)

    def _note_attributes(self, running: Application, results: tuple[Any, ...]) -> None:
        """Note what the context of a Function holds: no hook is told of that."""
        held = {}
        for tensor in tensors_in(attributes(results, running.cls)):
            if not isinstance(self.known.find(tensor), ParameterRef):
                held[storage_of(tensor)] = tensor.untyped_storage().nbytes()
                self.known.pin(tensor)
        if held:
            self._remark(
                f"{running.cls.__name__}: holds {sum(held.values())} bytes in attributes of ctx, whatever the plan"
            )

    def _remark(self, remark: str) -> None:
        if remark:
            self._remarks[remark] = None

    def _save(self, tensor: torch.Tensor, states: Sequence[torch.Tensor], ops_done: int, fresh: bool) -> None:
        """Note a call of the pack hook; `states` are the random generators' then."""
        self._note_compiled()
        self._draws.mark(states)
        plannable = tensor.numel() > 0 and not (tensor.is_conj() or tensor.is_neg())
        ref = self._refer(tensor) if plannable else None
        self._positions.append(Position(ref, ops_done, fresh))
        if isinstance(ref, ValueRef):
            self._seen.add(ref.index)
            self.known.tensors.hold(ref.index)

    def _note(self, ran: Ran) -> None:
        """Note a call that has run, if it has made anything."""
        index = len(self._ops)
        bases = self._bases(ran.written)
        draw, unknown = self._draws.of(ran.given, ran.states)
        refusal, (written, makers) = ran.refusal or unknown, (tuple(bases), tuple(bases.values()))
        op = RecordedOp(index, ran.func, ran.args, ran.kwargs, (), refusal, draw, makers, written, ran.python_reads)
        if ran.dynamic:
            self._masks.update(r.index for r in op.references if r.geometry.dtype in MASKS and type(r) is ValueRef)
        dynamic = ran.dynamic or any(self.known.values[value].dynamic for value in op.reads)
        rewritten: list[int] = []
        for tensor in ran.written:
            rewritten += self.known.overwritten(tensor, op, len(ran.outputs) + len(rewritten))
        given = {storage_of(tensor) for tensor in tensors_in(ran.given)}
        made = [self._made(ran, op, output, dynamic, given) for output in range(len(ran.outputs))]
        if not rewritten and all(value is None for value in made):
            # Autograd detaches what it saves: that is no operator of the program.
            self._fresh = self._fresh and ran.func is torch.ops.aten.detach.default
            return  # Rule 3: a view, which its geometry describes, or only Python numbers
        if op.refusal == UNINITIALISED:
            op = by_look(op, ran.outputs[0])
        op = with_dtype(op, ran.outputs[0])
        if dynamic and op.refusal in (None, UNINITIALISED):
            op = replace(op, refusal="its shape depends on data")
        for base in bases.values():
            self._ops[base.index] = replace(base, refusal=base.refusal or _OVERWRITTEN)
        self._fresh = True
        self._seen.update(op.reads)
        self.labels.note()
        self._ops.append(replace(op, outputs=(*made, *rewritten)))
        if draw is not None:
            self._draws.add(self._ops[-1])
        self._verify(self._ops[-1], ran.given)

    def _verify(self, op: RecordedOp, given: tuple[Any, Any]) -> None:
        """Refuse the operator if it does not replay to the same bits (Rule 9); else let its results die."""
        if not op.replayable:
            return
        with self.aside(), unmoved(generators_in(given)):
            reason = difference(op, self.known.tensors, self.known.parameters)
        if reason is not None:
            self._ops[-1] = replace(op, refusal=reason)
        elif op.draw is None:  # a draw may still turn out not to be replayable
            self.known.tensors.release(op.outputs)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """The recorder's own work: no Python call of it is watched, and from a call that it cannot record it stops."""
        told = sys.getprofile()
        sys.setprofile(None)
        try:
            yield
        except Unrecordable as reason:
            self.failure = str(reason)
        finally:
            sys.setprofile(told)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The recorder notes no operator that runs here, and no pack hook is called."""
        was_aside, self._is_aside = self._is_aside, True
        try:
            with torch.autograd.graph.saved_tensors_hooks(_same, _same):
                yield
        finally:
            self._is_aside = was_aside

    def _bases(self, written: Sequence[torch.Tensor]) -> dict[int, RecordedOp]:
        """By value, what made the tensors that are written to, if no one has read any of them yet (Rule 4)."""
        bases = {}
        for tensor in written:
            values = self.known.in_storage(tensor)
            producer = self.known.values[values[0]].producer if len(values) == 1 else None
            if producer is None or self._ops[producer].refusal not in (None, UNINITIALISED):
                return {}
            if values[0] in self._seen or values[0] in bases:
                return {}
            bases[values[0]] = self._ops[producer]
        return bases

    def _note_compiled(self) -> bool:
        """Whether compiled code runs now."""
        compiled = in_compiled_code()
        if compiled:
            self._doubt_from_here()
        return compiled

    def _doubt_from_here(self) -> None:
        """From here on, another call may save other tensors (Rule 7)."""
        if self._turn is None:
            self._turn = len(self._positions)

    def _made(self, ran: Ran, op: RecordedOp, output: int, dynamic: bool, given: set[int]) -> int | None:
        """A new value for an operator's output; None if it is no tensor, or a view of an argument (Rule 3).

        Of what a Function saves, None also if it is (part of) a value. A generator's state is no output (Rule 16).
        """
        tensor, is_saved = ran.outputs[output], output >= len(ran.outputs) - ran.saved
        if not isinstance(tensor, torch.Tensor):
            return None
        admit(tensor)
        if storage_of(tensor) in given:
            return None
        if is_saved and self.known.find(tensor) is not None:
            return None
        if output in ran.handed_on:
            self.known.handed_on(tensor, op, output)
            return None
        return self.known.made(tensor, op, output, dynamic)

    def _refer(self, tensor: torch.Tensor) -> ValueRef | ParameterRef:
        found = self.known.find(tensor)
        if found is not None:
            return found
        return self._made_unseen(tensor) if in_compiled_code() else self.known.captured(tensor)

    def _made_unseen(self, tensor: torch.Tensor) -> ValueRef:
        """A new value for a tensor that a compiled kernel made, unseen by the dispatcher."""
        index = len(self._ops)
        op = RecordedOp(index, KERNEL, (), (), (len(self.known.values),), COMPILED)
        self.labels.note()
        self._ops.append(op)
        return ValueRef(self.known.made(tensor, op, 0), Geometry.of(tensor))

    def _arguments(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if refusal_of(func, False) in (OPAQUE, COLLECTIVE):
            return (), ()  # never replayed; subgraphs and process groups must not be kept alive
        named = tuple((name, self._encode(value)) for name, value in kwargs.items())
        return with_constants(func, (self._encode(args), named))

    def _encode(self, tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            return self._refer(tree)
        if isinstance(tree, tuple | list):
            return type(tree)(self._encode(item) for item in tree)
        return tree


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
