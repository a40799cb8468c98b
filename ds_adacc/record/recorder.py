"""Watch one forward of a block: write down its operators and the tensors that autograd saves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ds_adacc.program.arguments import generators_in, tensors_in
from ds_adacc.program.dispatch_modes import BesideCompiled
from ds_adacc.program.function_operator import as_tuple, why_not_one
from ds_adacc.program.generators import torch_unmoved, unmoved
from ds_adacc.program.graphs import is_graph, keep_numbers
from ds_adacc.program.recorded_op import RecordedOp
from ds_adacc.program.recording import Recording
from ds_adacc.program.refusals import COLLECTIVE, TAINTED, is_of_torch
from ds_adacc.program.registration import registration_of
from ds_adacc.program.schema import LIFT_FRESH, keeps_memory
from ds_adacc.program.signature import is_in_backward
from ds_adacc.python_state.guards import holds
from ds_adacc.python_state.places import Place
from ds_adacc.python_watch.watch import Watch
from ds_adacc.record.block_call import BlockCall
from ds_adacc.record.calls.function_call import FunctionCall
from ds_adacc.record.calls.kept_by_program import kept_by_arguments, kept_by_context
from ds_adacc.record.calls.kernel_call import KernelCall
from ds_adacc.record.calls.operator_call import OperatorCall
from ds_adacc.record.casts import CAST, Cast, Casts, is_autocasts
from ds_adacc.record.compiled_kernels import in_guards
from ds_adacc.record.draft import Draft
from ds_adacc.record.executed_call import ExecutedCall, is_detached
from ds_adacc.record.frames import renew_copied_variables, run_recorded
from ds_adacc.record.known_tensors import Unrecordable
from ds_adacc.record.replayable.made_of_numbers import is_number
from ds_adacc.record.replayable.verify import difference


class Recorder(BesideCompiled):
    """The dispatch mode and pack hook of one recorded forward, and what the watch tells of Python's calls.

    `draft` has what was written down, and `saved` what autograd saves, in order. Each operator is verified as soon as
    it has run, so that its results may die as they do without a recorder (Rule R2). After a call that it cannot record
    it only passes calls on; `failure` says why.

    torch.compile's code runs compiled, as it will in later calls. The dispatcher does not see all of its kernels. A
    graph that autograd knows is an operator as a whole (Rule R17); nothing else of compiled code is replayed (Rule R6).
    """

    supports_higher_order_operators = True
    sees_lifetimes = True  # whether it notes until when the program keeps results

    def __init__(self, name: str, call: BlockCall) -> None:
        super().__init__()
        self.name = name
        self.draft = Draft(call)
        self.failure: str | None = None
        self.saved: list[torch.Tensor] = []
        self.cached: list[Callable[[], Cast | None]] = []  # the casts that autocast keeps at the end, while it does
        self._thread = threading.get_ident()
        self._closure = call.closure  # not the call, which keeps its arguments alive
        self._casts = Casts()
        self._found: dict[int, Cast] = {}  # by operator, the casts that an earlier call has made
        self._made: dict[int, Callable[[], Cast | None]] = {}  # and those of this call, unless they have died (Rule R2)
        self._is_aside = False  # while it runs operators of its own
        self._has_collective = False  # of the call that is under way
        self._kernel: KernelCall | None = None  # the call of an operator of the user's that is under way
        self._running: FunctionCall | None = None
        self.watch = Watch(self)

    # -- what torch calls

    def called(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the block calls."""
        with self.watch.paused():  # what the recorder does is no part of the block, and slow while it is watched
            if not (self._records and self.sees_lifetimes):
                return self._dispatch(func, args, kwargs)
            renew_copied_variables()
            result = self._dispatch(func, args, kwargs)
            self.draft.lifetimes.note(result)
            return result

    def _dispatch(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.is_elsewhere() or not self._records or in_guards():
            return self._run(func, args, kwargs)
        if self._running is not None:
            result = self._run(func, args, kwargs)
            with self._noting():
                self._running.note(func, (args, kwargs), result)
            return result
        if keeps_memory(func, args) and self._is_parametrized(args[0]):
            return self._run(func, args, kwargs)
        if self._casts.makes(func, args, kwargs):
            return self._casts.add(args[0], self._run(func, args, kwargs))
        call: OperatorCall | None = None
        self._has_collective = False
        began = torch.autograd._get_sequence_nr()
        with self._noting():
            self._note_casts((args, kwargs))
            if func is LIFT_FRESH and is_number(args[0]):
                self.draft.note_number(args[0], is_doubtful=not self.watch.makes_of_number)
            call = OperatorCall(func, (args, kwargs), self.draft)
            if not is_of_torch(func):
                self._kernel = KernelCall(func, (args, kwargs))
                self.watch.reads.note(self._kernel.python_reads.places)
        try:
            result = self._run(func if self._kernel is None else self._kernel.run, args, kwargs)
        except Exception:
            self.note_read()  # data may be why, and the block may catch the error
            raise
        finally:
            kernel, self._kernel = self._kernel, None
        if call is not None and self.failure is None:
            with self._noting():
                ran = call.executed(result, kernel, self._has_collective)
                given = [*tensors_in(ran.given)]
                ran.detached, ran.began = is_detached(given), began
                if not ran.detached:
                    self.draft.note_gradients(given)
                self._note(ran)
        return result

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operator returns. Its kernel may be Python, which is watched."""
        self.watch.resume()
        try:
            return func(*args, **kwargs)
        finally:
            self.watch.pause()

    def run(self, call: BlockCall) -> Any:
        """What the call returns. Its operators pass through this mode."""
        with self:
            return run_recorded(call)

    def _is_parametrized(self, tensor: torch.Tensor) -> bool:
        """Whether it is a parameter that is given the memory that it has, which changes nothing."""
        with self._noting():
            return self.draft.note_own_memory(tensor)
        return False  # it cannot be recorded

    def is_elsewhere(self) -> bool:
        """Whether a second thread of the block's is here. Then nothing can be recorded: the order is never the same.

        Backward has threads of its own too. But whoever runs a backward inside waits for it.
        """
        if threading.get_ident() == self._thread or self._is_inside or is_in_backward():
            return False
        self.failure = self.failure or "its operators run in several threads, as torch.jit.fork has them"
        return True

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note one saved tensor. Returns an alias of it that is not part of the autograd graph."""
        with torch.no_grad(), self.aside():
            alias = tensor.detach()
        self.saved.append(alias)
        if self._running is not None:  # the Function's outputs are not known yet
            self._running.packed.append((alias, self.draft.draws.states()))
        elif self.failure is None:
            with self._noting():
                self._note_casts(tensor)
                self.draft.save(alias, self.draft.draws.states())
        return alias

    def note_read(self) -> None:
        """Note that Python reads data of which the dispatcher is not told (Rule R7)."""
        self.draft.taint.note_data_read()
        if self._running is not None:
            self._running.refuse("reads data into Python")

    def note_write(self, tensor: torch.Tensor) -> None:
        """Note that Python writes to a tensor element by element, of which the dispatcher is not told (Rule R19)."""
        if self._records and not self._is_inside:
            with self._noting():
                self.draft.record_write(tensor)

    def note_address(self, tensor: torch.Tensor | None) -> None:
        """Note that code is about to get the address of a tensor (None: of any), to which it may write (Rule R19)."""
        if self._records and not self._is_inside:
            with self._noting():
                self.draft.known.watch_for_writes(tensor)

    def note_collective(self) -> None:
        """Note that a collective is called, which the dispatcher does not tell of inside a custom operator."""
        self._has_collective = True

    def note_hook(self) -> None:
        """Note that a hook waits for the gradient of a tensor."""
        self.draft.has_hooks = True

    @torch._disable_dynamo
    def note_places(self, places: Mapping[str, Place]) -> None:
        """Note what a function reads that begins inside a Function, or in the kernel of an operator."""
        under_way = self._running or self._kernel
        if under_way is not None:
            under_way.python_reads.note(places)

    def function_begins(self, cls: type[torch.autograd.Function], args: tuple[Any, ...]) -> bool:
        """An `autograd.Function` is applied; False if its operators are to be recorded one by one (Rule R15)."""
        if not self._records:
            return False
        if is_graph(cls):
            self.draft.compiled.note_graph()
        elif self.draft.note_compiled():
            return False
        if self._kernel is not None or registration_of(cls).replay == "operators":
            return False  # within an operator's kernel it is a part of that
        reason = None if is_graph(cls) else why_not_one(cls, args, self._is_guarded)
        if reason is not None:
            if reason:
                self.draft.remark(f"{cls.__name__}: {reason}, so its operators are recorded one by one")
            return False
        with self._noting(), torch.no_grad():
            self._has_collective = False
            self._note_casts(args)
            self.draft.record_unseen_writes(args)
            self._running = FunctionCall(cls, args, self.draft.draws.states())
            self.watch.reads.note(self._running.python_reads.places)
            if registration_of(cls).replay == "never":
                self._running.refuse("it is registered as never to be replayed")
        return self._running is not None

    def function_is_hidden(self, cls: type[torch.autograd.Function]) -> None:
        """An `autograd.Function` is applied that cannot be followed: what it writes by address would not be noticed."""
        if self._records and not self._is_inside and not self.draft.note_compiled():
            self.failure = (
                f"{cls.__name__}.apply is called by C code (as by map or functools.partial), or its forward or "
                f"setup_context is no Python function. Call it in Python, as in lambda x: {cls.__name__}.apply(x)"
            )

    def function_ends(self, result: Any, context: Any, raised: bool) -> None:
        """The Function has returned, or raised an error."""
        running, self._running = self._running, None
        assert running is not None
        if self.failure is not None:
            return
        results = as_tuple(result)
        detached = is_detached(tensors_in(results))
        with self._noting(), torch.no_grad():
            self.draft.note_gradients(tensors_in(running.args))
            written = running.finish(results)
            if raised:
                running.refuse("it has raised an error")
            if written and not self.draft.bases(written):
                running.refuse("it writes to an argument in place")
            if self.draft.taint.is_there:
                running.refuse(TAINTED)
            if running.reads_data:
                self.note_read()
            if self._has_collective:
                running.refusal = COLLECTIVE
            ran = running.executed(results, written, self.draft.encode)
            ran.detached = detached and not written  # no schema tells which of its arguments keep a gradient
            ran.began = running.began
            op = self._note(ran)
            for tensor, states in running.packed:
                self.draft.save(tensor, states, op)
            if not raised and is_graph(running.cls):
                keep_numbers(running.cls, context, running.args)
            if not raised and any(tensor.requires_grad for tensor in tensors_in(results)):
                self.draft.remark(kept_by_context(running, context, self.draft.known))

    # -- the result

    def recording(self, discarded: Mapping[int, int], arguments: Iterable[Any]) -> Recording:
        """The block's program. `discarded`: as of `LateSlots.close`. `arguments`: as of `BlockCall`.

        Raises `Unrecordable` with the reason if there is none.
        """
        if self.failure is not None:
            raise Unrecordable(self.failure)
        self.draft.taint.doubt_kept_numbers()
        self.draft.discard(discarded)
        for remark in kept_by_arguments(arguments, self.draft.known):
            self.draft.remark(remark)
        casts = self._found | {index: cast for index, made in self._made.items() if (cast := made()) is not None}
        cached = {index: cast for index, cast in casts.items() if is_autocasts(cast)}
        self.draft.note_cached(cached)
        self.cached = [cast.while_alive() for cast in cached.values()]
        kept = self._found.keys() - cached.keys()
        return self.draft.recording(self.name).refuse(dict.fromkeys(kept, "the program keeps what it has made"))

    # -- bookkeeping

    @property
    def _records(self) -> bool:
        """Whether what runs now is the block's, and is written down."""
        return self.failure is None and not self._is_aside

    @property
    def _is_inside(self) -> bool:
        """Whether it runs within a Function, or within an operator's kernel: it is a part of that."""
        return self._running is not None or self._kernel is not None

    def _is_guarded(self, thing: Any) -> bool:
        """Whether the block's guards notice when something else takes its place."""
        return holds(self._closure.marks(), thing) or holds(self.watch.reads.marks, thing)

    def _note_casts(self, given: Any) -> None:
        """Note the casts of parameters that are about to be read or saved first, whichever call has made them."""
        for each in self._casts.read(given, self.draft.known):
            call = OperatorCall(CAST, ((each.parameter,), {"dtype": each.cast.dtype}), self.draft)
            op = self._note(call.executed(each.cast, None, self._has_collective))
            if op is not None and each.is_found:
                self._found[op.index] = each
            elif op is not None:
                self._made[op.index] = each.while_alive()

    def _note(self, ran: ExecutedCall) -> RecordedOp | None:
        """Note a call. Returns its operator, if any, which is refused if it gives other bits again (Rule R9)."""
        op, known = self.draft.note(ran), self.draft.known
        if ran.began is not None:
            self.draft.note_call(ran.began, op, ran.written)
        if op is None or not op.replayable:
            return op
        runs_python = any(part.python_reads is not None for part in op.parts)  # NumPy's state takes longest to put back
        with (unmoved if runs_python else torch_unmoved)(generators_in(ran.given)):
            reason = difference(op, known.tensors, known.parameters)
        if reason is not None:
            self.draft.refuse_last(reason)
        elif op.draw is None:  # a draw may still turn out not to be replayable
            known.tensors.release(op.outputs)  # they may die as they do without a recorder (Rule R2)
        return op

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """The recorder's own work: nothing of it is noted, and from a call that it cannot record it stops."""
        try:
            with self.aside():
                yield
        except Unrecordable as reason:
            self.failure = str(reason)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The recorder notes no operator that runs here, and no pack hook is called."""
        was_aside, self._is_aside = self._is_aside, True
        try:
            with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, _same):
                yield
        finally:
            self._is_aside = was_aside


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
