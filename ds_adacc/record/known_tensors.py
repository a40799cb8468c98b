"""Which value or parameter of a block a tensor is, while the block is recorded: found by where it lies in memory."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ds_adacc.program.arguments import ParameterRef, ValueRef, tensors_in
from ds_adacc.program.geometry import Geometry, span, storage_of, why_not_plain
from ds_adacc.program.recorded_op import RecordedOp
from ds_adacc.program.recording import RecordedValue
from ds_adacc.program.same_bits import checksum
from ds_adacc.python_state.closure import Closure
from ds_adacc.python_state.held_tensors import Path
from ds_adacc.record.lifetimes import Lifetimes
from ds_adacc.record.tensors import RecordedTensors


class Unrecordable(Exception):
    """The block cannot be recorded; the message says why."""


class KnownTensors:
    """The values, parameters and buffers that a recorded block was seen to use so far, and `tensors` by value."""

    def __init__(self, inputs: Sequence[torch.Tensor], closure: Closure) -> None:
        self.values: list[RecordedValue] = []
        self.tensors = RecordedTensors()
        self.parameters: list[torch.Tensor] = []
        self.buffers: list[tuple[weakref.ref[Any], Path]] = []
        self._closure = closure
        self._places: dict[int, int] = {}  # in `parameters`, by identity
        self._by_address = {parameter.data_ptr(): parameter for parameter in reversed([*closure.parameters])}
        self._addresses = {id(parameter): parameter.data_ptr() for parameter in closure.parameters}
        self._versions = {id(parameter): parameter._version for parameter in closure.parameters}
        self._in_storage: dict[int, list[torch.Tensor]] = {}  # as they lie before the forward
        for parameter in (each for each in closure.parameters if why_not_plain(each) is None):
            self._in_storage.setdefault(storage_of(parameter), []).append(parameter)
        self._moved: set[int] = set()  # the places of parameters that had other memory when something read them
        # As they are before the forward, since a later call reads them then: what the forward itself puts in their
        # place may come from anywhere. Each with an alias: one that is made within the forward's operators counts no
        # writes, and a replay in this call's backward must notice them.
        plain = (held for held in closure.buffers() if why_not_plain(held[-1]) is None)
        self._buffers = [(*held, held[-1].detach()) for held in plain]
        self._roots: dict[int, list[int]] = {}
        self._checksums: dict[int, list[list[int]]] = {}  # by index, of values that code may write to unseen (Rule R19)
        self._exposed: set[int] = set()  # the storages whose address was taken
        self._is_all_exposed = False
        for position, tensor in enumerate(inputs):
            self.external(tensor, "input", position)

    def find(self, tensor: torch.Tensor) -> ValueRef | ParameterRef | None:
        """What the tensor is a view of: a value, a parameter or a buffer of the block. None if it is none of these."""
        require_plain(tensor)
        index = self._value(tensor)
        if index is None:
            parameter = self._parameter(tensor)
            if parameter is not None:
                return ParameterRef(parameter, Geometry.of(tensor, self.parameters[parameter].data_ptr()))
            index = self._buffer(tensor)
        return None if index is None else self._view(tensor, index)

    def captured(self, tensor: torch.Tensor) -> ValueRef:
        """A tensor that neither belongs to the block nor was made by it."""
        return self._view(tensor, self.external(tensor, "captured", len(self.values)))

    def in_storage(self, tensor: torch.Tensor) -> Sequence[int]:
        """The current values in the tensor's storage."""
        return self._roots.get(storage_of(tensor), ())

    def parameters_in(self, tensor: torch.Tensor) -> set[int]:
        """The parameters that share memory with the tensor, by index."""
        start, stop = span(tensor)
        near = ((parameter, *span(parameter)) for parameter in self._in_storage.get(storage_of(tensor), ()))
        found = {self._place(parameter) for parameter, low, high in near if max(low, start) < min(high, stop)}
        if not found and self._value(tensor) is None:  # ZeRO-3 may have moved it
            one = self._parameter(tensor)
            return set() if one is None else {one}
        return found

    def external(self, tensor: torch.Tensor, origin: str, source: int, alias: torch.Tensor | None = None) -> int:
        """The value of a tensor that no operator of the block made. `alias`: what is held of it; None: a new alias."""
        require_plain(tensor)
        known = self._value(tensor)
        if known is not None:
            return known
        index = len(self.values)
        # A view of a parameter, as learned queries are that were expanded to the batch, frees no memory either. One of
        # a parameter of ZeRO-3 does: it keeps what was gathered.
        whole = tensor if tensor._base is None or hasattr(tensor._base, "ds_id") else tensor._base
        facts = {"requires_grad": tensor.requires_grad, "is_parameter": isinstance(whole, torch.nn.Parameter)}
        name, geometry = f"{origin}.{source}", Geometry.of(tensor)
        held = tensor.detach() if alias is None else alias
        self._add(held, RecordedValue(index, name, origin, geometry, source=source, **facts))
        return index

    def made(self, tensor: torch.Tensor, op: RecordedOp, output: int, dynamic: bool = False) -> int:
        """A new value: output number `output` of `op`."""
        require_plain(tensor)
        name = f"{op.short_name}{op.index}" + (f".{output}" if output else "")
        facts = {"producer": op.index, "output": output, "dynamic": dynamic}
        index = len(self.values)
        self._add(tensor.detach(), RecordedValue(index, name, "made", Geometry.of(tensor), **facts))
        return index

    def handed_on(self, tensor: torch.Tensor, op: RecordedOp, output: int) -> None:
        """A new value for a generator's state that `op` has returned (Rule R16). No operator counts as its producer."""
        require_plain(tensor)
        index, name = len(self.values), f"{op.short_name}{op.index}.{output}"
        self._add(tensor.detach(), RecordedValue(index, name, "state", Geometry.of(tensor), source=index))

    def overwritten(self, tensor: torch.Tensor, op: RecordedOp, output: int) -> list[int]:
        """Rule R4: mark the values in the storage that `op` has written to. Returns the new values in their place.

        They count as outputs of `op`, from number `output` on.
        """
        old = self._roots.pop(storage_of(tensor), [])
        if not old:
            raise Unrecordable(f"{op.short_name} writes to a parameter in place")
        new = []
        for index in old:
            value = self.values[index]
            self.values[index] = replace(value, overwritten=True)
            self._checksums.pop(index, None)
            new.append(len(self.values))
            facts = {"producer": op.index, "output": output + len(new) - 1, "dynamic": value.dynamic}
            after = RecordedValue(new[-1], f"{op.short_name}{op.index}", "made", value.geometry, **facts)
            self._add(self.tensors.hold(index), after)
        return new

    def watch_for_writes(self, tensor: torch.Tensor | None) -> None:
        """From now on `written_unseen` tells of writes to the memory of this tensor (None: of any), now and later."""
        if tensor is None:
            self._is_all_exposed = True
        else:
            self._exposed.add(storage_of(tensor))
        for index in itertools.chain(*self._roots.values()) if tensor is None else self.in_storage(tensor):
            if index not in self._checksums:
                self._store_checksum(index)

    def accept_changes(self, given: Any) -> None:
        """Take new checksums of these arguments, after an operator that writes to them and does not say so."""
        for index in self._watched(given):
            self._store_checksum(index)

    def written_unseen(self, given: Any) -> list[torch.Tensor]:
        """Of the values among the arguments (None: of all), the tensors that have changed, one of each storage."""
        changed: dict[int, torch.Tensor] = {}
        for index in self._watched(given):
            tensor = self.tensors.at_hand(index)
            if tensor is not None and checksum(tensor) != self._checksums[index]:
                changed.setdefault(storage_of(tensor), tensor)
        return list(changed.values())

    def _watched(self, given: Any) -> list[int]:
        """The values that have a checksum: those among the arguments, or all if `given` is None."""
        if not self._checksums or given is None:
            return list(self._checksums)
        found = {self._value(tensor) for tensor in tensors_in(given) if why_not_plain(tensor) is None}
        return sorted(self._checksums.keys() & found)

    def _store_checksum(self, index: int) -> None:
        tensor = self.tensors.at_hand(index)
        if tensor is not None:
            self._checksums[index] = checksum(tensor)

    def moved(self) -> set[int]:
        """The parameters that the forward has given other memory, if only for a while."""
        return self._moved | {index for index, each in enumerate(self.parameters) if self._is_elsewhere(each)}

    def _is_elsewhere(self, parameter: torch.Tensor) -> bool:
        """Whether it has other memory than before the forward. Those that ZeRO-3 moves have the same data."""
        before = self._addresses.get(id(parameter))
        return before not in (None, parameter.data_ptr()) and not hasattr(parameter, "ds_id")

    def counts(self, parameter: int) -> bool:
        """Whether this parameter's version has counted a write since the forward began."""
        found = self.parameters[parameter]
        return self._versions.get(id(found)) != found._version

    def pin(self, tensor: torch.Tensor) -> None:
        """Note that the program itself holds the tensor's storage until backward, whatever becomes of its values."""
        for index in self.in_storage(tensor):
            self.values[index] = replace(self.values[index], pinned=True)

    def with_lifetimes(self, lifetimes: Lifetimes) -> list[RecordedValue]:
        """The values, each with the last operator to run while the program keeps it."""
        until = {index: lifetimes.alive_until(each) for each, indices in self._roots.items() for index in indices}
        return [replace(value, alive_until=until.get(value.index, -1)) for value in self.values]

    def _add(self, tensor: torch.Tensor, value: RecordedValue) -> None:
        self.values.append(replace(value, device=tensor.device.type))
        with torch.no_grad():
            self.tensors.append(tensor)
            if self._is_all_exposed or storage_of(tensor) in self._exposed:
                self._store_checksum(value.index)
        self._roots.setdefault(storage_of(tensor), []).append(value.index)

    def _view(self, tensor: torch.Tensor, index: int) -> ValueRef:
        return ValueRef(index, Geometry.of(tensor, self.tensors.span(index)[0]))

    def _value(self, tensor: torch.Tensor) -> int | None:
        """The current value that holds all of the tensor's bytes."""
        start, stop = span(tensor)
        for index in reversed(self.in_storage(tensor)):
            low, high = self.tensors.span(index)
            if low <= start and stop <= high:
                return index
        return None

    def _parameter(self, tensor: torch.Tensor) -> int | None:
        """Which parameter `tensor` is part of, by its address (Rule R5)."""
        start, stop = span(tensor)
        if start == stop:
            return None
        # Most tensors begin where their parameter does. To look at all of them each time takes seconds in a block with
        # a hundred experts. ZeRO-3 moves parameters meanwhile, so what was at the address may be elsewhere.
        found = self._by_address.get(start)
        if found is None or not _holds(found, start, stop):
            every = itertools.chain(self.parameters, self._closure.parameters)
            found = next((parameter for parameter in every if _holds(parameter, start, stop)), None)
            if found is None:
                return None
            self._by_address[start] = found
        return self._place(found)

    def _place(self, found: torch.Tensor) -> int:
        """The index of a parameter that the block uses."""
        if id(found) not in self._places:  # it is read for the first time
            self._places[id(found)] = len(self.parameters)
            self.parameters.append(found)
        place = self._places[id(found)]
        if self._is_elsewhere(found):
            self._moved.add(place)
        return place

    def _buffer(self, tensor: torch.Tensor) -> int | None:
        """Which buffer `tensor` is part of. Another one in the same memory may be elsewhere in a later call."""
        storage, (start, stop) = storage_of(tensor), span(tensor)
        for owner, path, buffer, alias in self._buffers:
            if storage_of(buffer) == storage and _holds(buffer, start, stop):
                self.buffers.append((weakref.ref(owner), path))
                return self.external(buffer, "buffer", len(self.buffers) - 1, alias)
        return None


def _holds(whole: torch.Tensor, start: int, stop: int) -> bool:
    low, high = span(whole)
    return low <= start and stop <= high


def require_plain(tensor: torch.Tensor) -> None:
    """Raises `Unrecordable` for a tensor of another kind than blocks are recorded with."""
    reason = why_not_plain(tensor)
    if reason is not None:
        raise Unrecordable(f"it handles a {reason}")
    if tensor._is_zerotensor():  # it has no memory that could be read
        raise Unrecordable("it handles a tensor of zeros without memory, as torch.func.jvp makes them")
