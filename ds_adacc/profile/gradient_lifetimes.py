"""Which gradients are alive at each step of a block's backward."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence

import torch

from ds_adacc.program.arguments import ParameterRef, ValueRef, references
from ds_adacc.program.geometry import Geometry
from ds_adacc.program.recorded_op import RecordedOp
from ds_adacc.program.recording import Recording
from ds_adacc.program.refusals import COLLECTIVE, OPAQUE
from ds_adacc.program.schema import written_values

SUMS = ("add", "add_", "sub", "sub_")
JOINS = ("cat", "stack")


class GradientLifetimes:
    """A gradient is alive from the step of its value's last reader to that of the value's producer.

    Values have their index here. What is not a whole value has a gradient of its own, and a further number:

    * A part of a split value. Its gradient waits for those of the other parts. After the step of the operator that
      reads any of them first, the last such step in backward, all are joined to one of the whole.
    * A slice of a value, or of a part. After the step of its reader, its gradient is put into one of the whole. So is
      that of a view with more elements, as `expand` makes it: they are added up.

    What reads a part or a slice is no reader of the whole. The operator after whose step the gradient of the whole is
    made of theirs counts as one.

    `required`: the values that get a gradient.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.required = _require_grad(recording)
        self._bytes = [value.nbytes for value in recording.values]
        self._born = [max(-1 if value.producer is None else value.producer, 0) for value in recording.values]
        self._parts: dict[tuple[int, Geometry], int] = {}
        self._slices: dict[tuple[int, ValueRef], int] = {}  # by the operator that reads it
        self._first_read: dict[int, int] = {}  # by split value, the operator that reads a part of it first
        self._joined: dict[int, list[int]] = {}  # by operator, the wholes that get a gradient after its step
        for op in recording.ops:
            self._number_views(op)
        self._number_unread_parts()
        self._counted = {*self.required, *range(len(recording.values), len(self._bytes))}
        self._readers: dict[int, list[RecordedOp]] = {}
        for op in recording.ops:
            for number in dict.fromkeys((*self._gets(op), *self._joined.get(op.index, ()))):
                self._readers.setdefault(number, []).append(op)
        self._handed_on: dict[int, int] = {}  # by value, the owner of the gradient that its last reader hands on
        self._find_handed_on()

    @property
    def steps(self) -> list[int]:
        """The operators whose backward step makes a gradient. That of a sum only hands on the one that it gets."""
        ops = [op for op in self.recording.ops if not op.detached and self.required.intersection(op.outputs)]
        return [op.index for op in ops if op.index in self._joined or (op.short_name not in SUMS and self.made(op))]

    @property
    def of_outputs(self) -> int:
        """Bytes of the gradients with which the block's backward begins."""
        return sum(self._bytes[value] for value in self.required if value not in self._readers)

    def most(self, index: int, workspace: int, after: bool = True) -> int:
        """The most bytes at the step of operator `index`: gradients, and what the step takes and frees again.

        `workspace`: bytes that the operator itself so takes. Afterwards, what it makes is added to other gradients, and
        those of a split's parts are joined: that counts if `after`.
        """
        step = self._during(index, workspace, sums=after)
        return max(step, self._joining(index)) if after and index in self._joined else step

    def _during(self, index: int, workspace: int, sums: bool) -> int:
        """As `most`, without joining. What is added to other gradients counts if `sums`."""
        later = {whole for whole in self._joined.get(index, ()) if self._comes_after(whole, index)}
        owners = Counter(self._owner(number, index) for number in self._alive[index] if number not in later)
        total = sum(self._bytes[owner] for owner in owners)
        if index == len(self.recording.ops):
            return total + workspace
        op = self.recording.ops[index]
        if op.detached:
            return total + workspace
        added = [number for number in self._references(op) if number in self._counted]
        added = [number for number in added if self._last_read(number) > index]
        # A sum takes the place of the gradient that was there first, unless another value's gradient still shares that,
        # or it is a view of a larger one.
        sharing = ((number, self._owner(number, index)) for number in added)
        shared = [n for n, owner in sharing if owners[owner] > 1 or self._bytes[owner] != self._bytes[n]]
        of_sums = max((self._bytes[number] for number in shared), default=0) if sums else 0
        beside = sum(self._bytes[number] for number in added)
        return total + beside + self._parameters(op) + max(workspace, of_sums)

    def _joining(self, index: int) -> int:
        """The bytes when wholes are made of parts and slices, after the step of `index`: it has let go of what it got.

        What has a gradient already gets another one, which is then added to it.
        """
        outputs = self.recording.ops[index].outputs
        alive = {self._owner(number, index) for number in self._alive[index] if number not in outputs}
        more = (  # one that comes first is among those alive
            self._bytes[whole] * (min(times, 2) - self._comes_after(whole, index))
            for whole, times in Counter(self._joined[index]).items()
        )
        return sum(self._bytes[owner] for owner in alive) + sum(more)

    def _comes_after(self, whole: int, index: int) -> bool:
        """Whether the first gradient of a whole is the one that is made after the step of operator `index`."""
        return self._last_read(whole) == index and whole not in self._references(self.recording.ops[index])

    def arriving(self, index: int) -> int:
        """Bytes of the gradients that are alive when the step of operator `index` begins."""
        alive = (number for number in self._alive[index] if self._last_read(number) > index)
        return sum(self._bytes[owner] for owner in {self._owner(number, index) for number in alive})

    @functools.cached_property
    def _alive(self) -> list[list[int]]:
        """Whose gradients are alive at the step of each operator, and after the last one.

        In one pass: a block may have thousands of operators, of which each has few such values.
        """
        born: dict[int, list[int]] = {}
        for number in sorted(self._counted):
            born.setdefault(self._born[number], []).append(number)
        found: list[list[int]] = []
        alive: list[int] = []
        for index in range(len(self.recording.ops) + 1):
            alive = [number for number in alive if self._last_read(number) >= index] + born.get(index, [])
            found.append(alive)
        return found

    def _last_read(self, number: int) -> float:
        return self._readers[number][-1].index if number in self._readers else math.inf

    def _owner(self, number: int, index: int) -> int:
        """Whose gradient shares its memory with that of `number` while the step of operator `index` runs.

        The step of a sum hands on the gradient that it gets, to both terms the same. A term keeps it until another of
        its readers adds to it. That of `cat` hands on views, each of which keeps all of the gradient that it gets.
        """
        readers = self._readers.get(number, [])
        others_have_added = len(readers) > 1 and index < readers[-2].index
        return number if others_have_added else self._handed_on.get(number, number)

    def _find_handed_on(self) -> None:
        for op in reversed(self.recording.ops):
            for index in self._gets(op):
                if self._readers[index][-1] is op and _hands_on(op, index, self.recording):
                    given = op.outputs[-1]
                    assert given is not None  # else it would hand on nothing
                    self._handed_on[index] = self._owner(given, op.index)

    def _number_views(self, op: RecordedOp) -> None:
        """Give numbers to the parts and slices that `op` reads, if they get a gradient."""
        for ref in () if op.detached else op.references:
            if not isinstance(ref, ValueRef) or ref.index not in self.required:
                continue
            whole, looks = ref.index, self.recording.values[ref.index].geometry
            if ref.part is not None:
                if ref.index not in self._first_read:
                    self._first_read[ref.index] = op.index
                    self._joined.setdefault(op.index, []).append(ref.index)
                looks = ref.part
                if (ref.index, looks) not in self._parts:
                    self._parts[ref.index, looks] = self._new(looks.nbytes, self._first_read[ref.index])
                whole = self._parts[ref.index, looks]
            if ref.geometry.nbytes != looks.nbytes:
                self._slices[op.index, ref] = self._new(ref.geometry.nbytes, op.index)
                self._joined.setdefault(op.index, []).append(whole)

    def _number_unread_parts(self) -> None:
        """Give a number to what no operator reads of each split value. It counts until the parts are joined.

        The block may return it, so that its gradient arrives with the block's. Else zeros are joined in its place.
        """
        sliced = {ref.index for _, ref in self._slices if ref.part is None}  # its parts may count as slices (`Splits`)
        unread = {whole: self._bytes[whole] for whole in self._first_read if whole not in sliced}
        for (whole, _), number in self._parts.items():
            if whole in unread:
                unread[whole] -= self._bytes[number]
        for whole, nbytes in unread.items():
            if nbytes > 0:
                self._new(nbytes, self._first_read[whole])

    def _new(self, nbytes: int, born: int) -> int:
        """A number for what has so many bytes. `born`: the operator after whose step its gradient is gone."""
        self._bytes.append(nbytes)
        self._born.append(born)
        return len(self._bytes) - 1

    def made(self, op: RecordedOp) -> int:
        """Bytes of the gradients that the step of `op` itself makes."""
        made = sum(self._bytes[number] for number in self._references(op) if number in self._counted)
        return made + self._parameters(op)

    def _gets(self, op: RecordedOp) -> Sequence[int]:
        """What gets a gradient from the step of `op`, if it has one. A value written to past autograd keeps its own."""
        return written_values(op) if op.detached else self._references(op)

    def _references(self, op: RecordedOp) -> Sequence[int]:
        """The values, parts and slices that it reads, each once."""
        refs = (ref for ref in op.references if isinstance(ref, ValueRef))
        return list(dict.fromkeys(self._number(op, ref) for ref in refs))

    def _number(self, op: RecordedOp, ref: ValueRef) -> int:
        part = None if ref.part is None else self._parts.get((ref.index, ref.part))
        return self._slices.get((op.index, ref), ref.index if part is None else part)

    def _parameters(self, op: RecordedOp) -> int:
        """The gradients of the parameters that `op` reads, before they are added to `.grad`."""
        read = {ref.index for ref in op.references if not isinstance(ref, ValueRef)}
        parameters = [self.recording.parameters[index] for index in read]
        return sum(p.element_size() * getattr(p, "ds_numel", p.numel()) for p in parameters if p.requires_grad)


def _hands_on(op: RecordedOp, value: int, recording: Recording) -> bool:
    """Whether the step of `op` hands on the gradient that it gets to `value` as it is."""
    if op.detached:
        return len({*written_values(op)}) == 1  # of several it is not known which is which after the write
    if op.short_name in JOINS and op.outputs[-1] is not None:
        terms = [term for term in references(op.args) if isinstance(term, ValueRef) and term.index == value]
        return [t.geometry.dtype for t in terms] == [recording.values[op.outputs[-1]].geometry.dtype]
    if op.short_name not in SUMS or dict(op.kwargs).get("alpha", 1) != 1 or op.outputs[-1] is None:
        return False
    terms = op.args[:1] if op.short_name.startswith("sub") else op.args[:2]
    made = recording.values[op.outputs[-1]].geometry
    given = [term.geometry for term in terms if isinstance(term, ValueRef) and term.index == value]
    return [(g.numel, g.dtype) for g in given] == [(made.numel, made.dtype)]


def _returned(op: RecordedOp) -> tuple[int | None, ...]:
    """The outputs that may have a gradient: not what an `autograd.Function` has saved."""
    if not op.is_function:
        return op.outputs
    saved = op.func.place_of_saved
    return (*op.outputs[: saved.start], *op.outputs[saved.stop :])


def _require_grad(recording: Recording) -> set[int]:
    required = {value.index for value in recording.inputs if value.requires_grad}
    for op in recording.ops:
        if _has_gradients(op) or not required.isdisjoint(written_values(op) if op.detached else op.reads):
            made = [recording.values[index] for index in _returned(op) if index is not None]
            required.update(v.index for v in made if _has_gradient(v.geometry.dtype) and v.role != "statistic")
    return required


def _has_gradients(op: RecordedOp) -> bool:
    """Whether what `op` makes has a gradient, whichever values it reads."""
    if op.detached:
        return False
    # Of a collective, or a higher-order operator, it is not recorded what it reads (`OperatorCall`).
    is_seen = op.detached is None or op.refusal in (OPAQUE, COLLECTIVE)
    return is_seen or any(isinstance(ref, ParameterRef) for ref in op.references)


def _has_gradient(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
