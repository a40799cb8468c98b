"""Watch one forward of a block: write down its operators and the tensors that autograd saves."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_adacc.record.closure import Closure
from ds_adacc.record.compiled import KERNEL, in_compiled_code
from ds_adacc.record.draws import Draws
from ds_adacc.record.generators import unmoved
from ds_adacc.record.geometry import Geometry, span
from ds_adacc.record.labels import Labels
from ds_adacc.record.parameters import Parameters
from ds_adacc.record.recording import (
    COLLECTIVE,
    COMPILED,
    UNINITIALISED,
    ParameterRef,
    Position,
    RecordedOp,
    RecordedValue,
    Recording,
    ValueRef,
)
from ds_adacc.record.schema import (
    MASKS,
    OPAQUE,
    by_look,
    generators_in,
    has_dynamic_shape,
    refusal_of,
    reveals_data,
    tensors_in,
    with_constants,
    with_dtype,
    written_tensors,
)
from ds_adacc.record.tensors import RecordedTensors
from ds_adacc.record.verify import difference, unsure

_OVERWRITTEN = "what it makes is overwritten in place"


class Unrecordable(Exception):
    """The block cannot be recorded; the message says why."""


class Recorder(TorchDispatchMode):
    """The dispatch mode and pack hook of one recorded forward.

    `tensors` are the values seen, by index, and `saved` what autograd saves, in order. Each operator is verified as
    soon as it has run, so that its results may die as they do without a recorder (Rule 2). After a call that it cannot
    record it only passes calls on; `failure` says why.

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
        self.inputs = inputs
        self.labels = Labels(inputs, found)
        self.failure: str | None = None
        self.tensors = RecordedTensors()
        self.saved: list[torch.Tensor] = []
        self.parameters: list[torch.Tensor] = []
        self.buffers: list[tuple[weakref.ref[Any], str]] = []
        self._closure = found
        self._values: list[RecordedValue] = []
        self._ops: list[RecordedOp] = []
        self._positions: list[Position] = []
        self._roots: dict[int, list[int]] = {}
        self._turn: int | None = None
        self._masks: set[int] = set()
        self._tainted = False
        self._is_aside = False  # while it runs operators of its own
        self._fresh = False
        self._seen: set[int] = set()  # the values that an operator has read, or autograd has saved
        self._draws = Draws(found.generators(), self._values, self.tensors)
        for position, tensor in enumerate(inputs):
            self._external(tensor, "input", position)

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
        encoded = states = None
        with self._noting():
            encoded = self._arguments(func, args, kwargs)
            states = self._draws.states()
        result = func(*args, **kwargs)
        if self.failure is None:
            with self._noting():
                self._note(func, encoded, (args, kwargs), result, states)
        return result

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note one saved tensor. Returns an alias of it that is not part of the autograd graph."""
        with torch.no_grad(), self.aside():
            tensor = tensor.detach()
        self.saved.append(tensor)
        if self.failure is None:
            with self._noting():
                self._note_compiled()
                self._draws.mark()
                plannable = tensor.numel() > 0 and not (tensor.is_conj() or tensor.is_neg())
                ref = self._refer(tensor) if plannable else None
                self._positions.append(Position(ref, len(self._ops), self._fresh))
                if isinstance(ref, ValueRef):
                    self._seen.add(ref.index)
                    with self.aside():
                        self.tensors.hold(ref.index)
        return tensor

    def note_read(self) -> None:
        """Note that Python reads data of which the dispatcher is not told (Rule 7)."""
        self._tainted = True
        self._doubt_from_here()

    # -- the result

    def recording(self) -> Recording:
        """The block's program. Raises `Unrecordable` with the reason if there is none."""
        if self.failure is not None:
            raise Unrecordable(self.failure)
        met = {id(parameter) for parameter in self.parameters}
        others = (parameter for parameter in dict.fromkeys(self._closure.parameters) if id(parameter) not in met)
        recording = Recording(
            self.name,
            tuple(self._values),
            tuple(self._ops),
            tuple(self._positions),
            Parameters((*self.parameters, *others), self._closure.tensors),
            tuple(self.buffers),
        )
        return recording.refuse({**unsure(recording, self._turn, self._masks), **self._draws.refusals()})

    # -- bookkeeping

    def _note(self, func: Any, encoded: tuple[Any, Any], given: tuple[Any, Any], result: Any, states: Any) -> None:
        """Note an operator that has run. `states` are the generators' from before."""
        outputs = result if isinstance(result, tuple | list) else (result,)
        index = len(self._ops)
        written = written_tensors(func, given)
        base, fresh = self._base(written)
        refusal = COMPILED if self._note_compiled() else refusal_of(func, self._tainted, base is not None)
        if not self._tainted and reveals_data(func, given, outputs):
            self._tainted = True
            self._doubt_from_here()
        draw, unknown = self._draws.of(given, states)
        op = RecordedOp(index, func, *encoded, (), refusal or unknown, draw, base, fresh)
        dynamic = has_dynamic_shape(func, given)
        if dynamic:
            self._masks.update(r.index for r in op.references if r.geometry.dtype in MASKS and type(r) is ValueRef)
        dynamic = dynamic or any(self._values[value].dynamic for value in op.reads)
        rewritten: list[int] = []
        for tensor in written:
            rewritten += self._overwrite(tensor, op, len(outputs) + len(rewritten))
        known = {tensor.untyped_storage()._cdata for tensor in tensors_in(given)}
        made = [self._made(tensor, op, position, dynamic, known) for position, tensor in enumerate(outputs)]
        if not rewritten and all(value is None for value in made):
            # Autograd detaches what it saves: that is no operator of the program.
            self._fresh = self._fresh and func is torch.ops.aten.detach.default
            return  # Rule 3: a view, which its geometry describes, or only Python numbers
        if op.refusal == UNINITIALISED:
            op = by_look(op, outputs[0])
        op = with_dtype(op, outputs[0])
        if dynamic and op.refusal in (None, UNINITIALISED):
            op = replace(op, refusal="its shape depends on data")
        if base is not None:
            self._ops[base.index] = replace(base, refusal=base.refusal or _OVERWRITTEN)
        self._fresh = True
        self._seen.update(op.reads)
        self.labels.note()
        self._ops.append(replace(op, outputs=(*made, *rewritten)))
        if draw is not None:
            self._draws.add(self._ops[-1])
        self._verify(self._ops[-1], given)

    def _verify(self, op: RecordedOp, given: tuple[Any, Any]) -> None:
        """Refuse the operator if it does not replay to the same bits (Rule 9); else let its results die."""
        if not op.replayable:
            return
        with self.aside(), unmoved(generators_in(given)):
            reason = difference(op, self.tensors, self.parameters)
        if reason is not None:
            self._ops[-1] = replace(op, refusal=reason)
        elif op.draw is None:  # a draw may still turn out not to be replayable
            self.tensors.release(op.outputs)

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
        """The recorder notes no operator that runs here."""
        self._is_aside = True
        try:
            yield
        finally:
            self._is_aside = False

    def _base(self, written: Sequence[torch.Tensor]) -> tuple[RecordedOp, int] | tuple[None, None]:
        """What made the tensor that is written to, if no one has read it yet, and which value it is (Rule 4)."""
        values = self._roots.get(written[0].untyped_storage()._cdata, []) if len(written) == 1 else []
        if len(values) == 1 and values[0] not in self._seen and self._values[values[0]].producer is not None:
            base = self._ops[self._values[values[0]].producer]
            if base.refusal in (None, UNINITIALISED):
                return base, values[0]
        return None, None

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

    def _made(self, tensor: Any, op: RecordedOp, output: int, dynamic: bool, known: set[int]) -> int | None:
        """A new value for an operator's output; None if it is no tensor, or a view of an argument (Rule 3)."""
        if not isinstance(tensor, torch.Tensor):
            return None
        self._admit(tensor)
        if tensor.untyped_storage()._cdata in known:
            return None
        index = len(self._values)
        name = f"{op.short_name}{op.index}" + (f".{output}" if output else "")
        self._add(tensor, RecordedValue(index, name, "made", Geometry.of(tensor), op.index, output, dynamic=dynamic))
        return index

    def _external(self, tensor: torch.Tensor, origin: str, source: int) -> int:
        self._admit(tensor)
        known = self._find(tensor)
        if known is not None:
            return known
        index = len(self._values)
        facts = {"requires_grad": tensor.requires_grad, "is_parameter": isinstance(tensor, torch.nn.Parameter)}
        self._add(
            tensor, RecordedValue(index, f"{origin}.{source}", origin, Geometry.of(tensor), source=source, **facts)
        )
        return index

    def _add(self, tensor: torch.Tensor, value: RecordedValue) -> None:
        self._values.append(replace(value, device=tensor.device.type))
        with torch.no_grad(), self.aside():
            self.tensors.append(tensor.detach())
        self._roots.setdefault(tensor.untyped_storage()._cdata, []).append(value.index)

    def _admit(self, tensor: torch.Tensor) -> None:
        if type(tensor) is not torch.Tensor and not isinstance(tensor, torch.nn.Parameter):
            raise Unrecordable(f"it handles a tensor of type {type(tensor).__name__}")
        if tensor.layout != torch.strided:
            raise Unrecordable(f"it handles a tensor of layout {tensor.layout}")

    def _find(self, tensor: torch.Tensor) -> int | None:
        """The current value that holds all of `tensor`'s bytes."""
        start, stop = span(tensor)
        for index in reversed(self._roots.get(tensor.untyped_storage()._cdata, ())):
            low, high = self.tensors.span(index)
            if low <= start and stop <= high:
                return index
        return None

    def _refer(self, tensor: torch.Tensor) -> ValueRef | ParameterRef:
        self._admit(tensor)
        index = self._find(tensor)
        if index is None:
            parameter = self._parameter(tensor)
            if parameter is not None:
                origin = self.parameters[parameter].data_ptr()
                return ParameterRef(parameter, Geometry.of(tensor, origin))
            index = self._captured(tensor)
        return ValueRef(index, Geometry.of(tensor, self.tensors.span(index)[0]))

    def _parameter(self, tensor: torch.Tensor) -> int | None:
        """Which parameter `tensor` is part of, by its address (Rule 5)."""
        start, stop = span(tensor)
        for index, parameter in enumerate(self.parameters):
            low, high = span(parameter)
            if low <= start and stop <= high and start < stop:
                return index
        for parameter in self._closure.parameters:
            low, high = span(parameter)
            if low <= start and stop <= high and start < stop:
                self.parameters.append(parameter)
                return len(self.parameters) - 1
        return None

    def _captured(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()._cdata
        for owner, name, buffer in self._closure.buffers():
            if buffer.layout == torch.strided and buffer.untyped_storage()._cdata == storage:
                self.buffers.append((weakref.ref(owner), name))
                return self._external(buffer, "buffer", len(self.buffers) - 1)
        if in_compiled_code():
            return self._made_unseen(tensor)
        return self._external(tensor, "captured", len(self._values))

    def _made_unseen(self, tensor: torch.Tensor) -> int:
        """A new value for a tensor that a compiled kernel made, unseen by the dispatcher."""
        op, index = len(self._ops), len(self._values)
        self.labels.note()
        self._ops.append(RecordedOp(op, KERNEL, (), (), (index,), COMPILED))
        self._add(tensor, RecordedValue(index, f"{KERNEL}{op}", "made", Geometry.of(tensor), op))
        return index

    def _overwrite(self, tensor: torch.Tensor, op: RecordedOp, output: int) -> list[int]:
        """Rule 4: mark the values in the storage that `op` has written to. Returns the new values in their place.

        They count as outputs of `op`, from number `output` on.
        """
        storage = tensor.untyped_storage()._cdata
        old = self._roots.pop(storage, [])
        if not old:
            raise Unrecordable(f"{op.name} writes to a parameter in place")
        new = []
        for index in old:
            value = self._values[index]
            self._values[index] = replace(value, overwritten=True)
            new.append(len(self._values))
            name = f"{op.short_name}{op.index}"
            facts = {"output": output + len(new) - 1, "dynamic": value.dynamic}
            self._add(
                self.tensors.hold(index),
                RecordedValue(new[-1], name, "made", value.geometry, op.index, **facts),
            )
        return new

    def _arguments(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if refusal_of(func, False) in (OPAQUE, COLLECTIVE):
            return (
                (),
                (),
            )  # never replayed, and its arguments (subgraphs, process groups) must not be kept alive
        named = tuple((name, self._encode(value)) for name, value in kwargs.items())
        return with_constants(func, (self._encode(args), named))

    def _encode(self, tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            return self._refer(tree)
        if isinstance(tree, tuple | list):
            return type(tree)(self._encode(item) for item in tree)
        return tree
