"""One block of the model, and a record for each signature and state in which it has been called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_adacc import planner
from ds_adacc.execute.bound_policy import BoundPolicy
from ds_adacc.record.guards import Guards, moved
from ds_adacc.record.recording import RecordedOp, Recording
from ds_adacc.record.signature import without_sizes

_RECORDS = 64  # a record holds a plan; a block called with ever new shapes must not pile them up
_DISTINCT_NUMBERS = 3


@dataclass
class Trial:
    """A policy whose gradient error is measured at the block's next call (`runtime/trials.py`).

    `is_in_force`: the block runs it already. `has_begun`: a call is measuring it. `result`: the `PolicyError` that was
    measured; None before.
    """

    policy: planner.Policy
    is_in_force: bool = False
    has_begun: bool = False
    result: Any = None


@dataclass
class Record:
    """What is known of one block under one signature.

    `state`: the guards of the block's modules when it was recorded; None: any state will do.
    `block_type`: the digest of its recording.
    `bound`: its policy; None if the block could not be recorded, and then it runs under plain autograd.
    `trial`: the policy that is measured at the record's next call. Unless it is in force, `bound` then holds everything
    exactly.
    `outliers`: for each value that the outlier codec may hold, the channels by falling Z-score and how many are above
    the threshold, both on the device.
    `changes`: how often each number in `state` was found changed. `settled`: the numbers that are guarded no longer.
    `volatile`: the operators that may follow those, with a reason; they are never replayed (Rule 11).
    `is_predicted`: the program was recorded at other input sizes, and is predicted at these.
    """

    state: Guards | None = None
    block_type: str = ""
    bound: BoundPolicy | None = None
    trial: Trial | None = None
    outliers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    changes: Counter[str] = field(default_factory=Counter)
    settled: frozenset[str] = frozenset()
    volatile: dict[int, str] = field(default_factory=dict)
    is_predicted: bool = False

    def at_other_sizes(self, state: Guards) -> Record:
        """A record of the same program at other sizes of its inputs, without a policy yet."""
        return Record(
            state,
            outliers=dict(self.outliers),
            changes=self.changes,
            settled=self.settled,
            volatile=self.volatile,
            is_predicted=True,
        )

    @property
    def is_tracked(self) -> bool:
        """Whether the next call measures the policy that is in force."""
        return self.trial is not None and self.trial.is_in_force

    def to_plain(self) -> dict[str, Any]:
        """What a checkpoint keeps of it: plain containers, numbers, and tensors on the host."""
        outliers = {i: (order.to("cpu", torch.int32), int(count)) for i, (order, count) in self.outliers.items()}
        return {
            "block_type": self.block_type,
            "outliers": outliers,
            "changes": dict(self.changes),
            "settled": sorted(self.settled),
            "volatile": dict(self.volatile),
        }

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Record:
        """The record that `to_plain` made `data` of; it has no policy yet."""
        outliers = {i: (order.long(), torch.tensor(count)) for i, (order, count) in data["outliers"].items()}
        changes, settled = Counter(data["changes"]), frozenset(data["settled"])
        return cls(None, data["block_type"], None, None, outliers, changes, settled, dict(data["volatile"]))

    def holds(self, state: Guards) -> bool:
        """Whether the block runs the recorded program when its modules are in `state`."""
        if self.state is None or self.state == state:
            return True
        return bool(self.settled) and (moved(self.state, state) or {""}) <= self.settled

    def succeed(self, earlier: Record, old: Recording, new: Recording) -> None:
        """Learn from the earlier record of the same signature, one of whose numbers has changed (Rule 11).

        A number on a schedule would have the block recorded at every step. Once it has been seen with three values and
        only constants of the program differed, it is guarded no longer. All operators with a constant that may follow
        it are then refused for replay, also where the constant has not changed yet: it may do so after a warm-up.
        """
        differing = _differing_constants(old, new)
        changed = None if earlier.state is None or self.state is None else moved(earlier.state, self.state)
        if differing is None or changed is None:
            return
        changed -= earlier.settled
        self.changes = earlier.changes + Counter(changed)
        self.settled, self.volatile = earlier.settled, earlier.volatile
        if changed and all(self.changes[name] >= _DISTINCT_NUMBERS - 1 for name in changed):
            reason = f"its constant may follow {', '.join(sorted(changed))}"
            suspects = [*differing, *(op.index for op in new.ops if _holds_scalar(op))]
            self.settled = earlier.settled | changed
            self.volatile = {**dict.fromkeys(suspects, reason), **earlier.volatile}


class Block:
    """A block and its records, at most 64; the least recently used is forgotten.

    `past`: its records in the run that this one resumes, the last used first.
    """

    def __init__(self, name: str, past: Sequence[Record] = ()) -> None:
        self.name = name
        self._records: list[tuple[Hashable, Record]] = []
        self._past = list(past)

    def find(self, signature: Hashable, state: Guards) -> Record | None:
        """The record for this signature and this state of the block's modules."""
        for position, (known, record) in enumerate(self._records):
            if known == signature and record.holds(state):
                if position:
                    self._records.insert(0, self._records.pop(position))
                return record
        return None

    def latest(self, signature: Hashable) -> Record | None:
        """The last used record for this signature, whatever its state."""
        return next((record for known, record in self._records if known == signature), None)

    def relative(self, opened: Hashable, state: Guards) -> tuple[Hashable, Record] | None:
        """The last used record, with its signature, whose signature differs at most in sizes and strides.

        `opened` is the signature without these (`signature.without_sizes`).
        """
        for signature, record in self._records:
            if record.bound is not None and record.holds(state) and without_sizes(signature)[0] == opened:
                return signature, record
        return None

    def forget(self, block_types: Collection[str]) -> None:
        """Forget the records of these block types."""
        self._records = [(s, record) for s, record in self._records if record.block_type not in block_types]

    def drop(self, record: Record) -> None:
        """Forget this record."""
        self._records = [(signature, other) for signature, other in self._records if other is not record]

    def add(self, signature: Hashable, record: Record) -> None:
        """Keep a new record, in place of those that held for the same calls."""
        others = [(s, r) for s, r in self._records if not (s == signature and _covers(record, r))]
        self._records = [(signature, record), *others][:_RECORDS]

    def records(self) -> list[Record]:
        return [record for _, record in self._records]

    def recall(self, recording: Recording) -> Record | None:
        """The record that the resumed run had of this program, which is handed out once; None if it had none."""
        for position, record in enumerate(self._past):
            if recording.refuse(record.volatile).digest == record.block_type:
                return self._past.pop(position)
        return None

    def to_plain(self) -> dict[str, Any]:
        """The name and all records with a policy, with those of the resumed run that were not recalled yet."""
        known = [*(record for record in self.records() if record.bound is not None), *self._past]
        return {"name": self.name, "records": [record.to_plain() for record in known]}

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Block:
        """The block that `to_plain` made `data` of, with its records as the past."""
        return cls(data["name"], [Record.from_plain(record) for record in data["records"]])


def _covers(record: Record, other: Record) -> bool:
    return other.state is None or record.holds(other.state)


def _holds_scalar(op: RecordedOp) -> bool:
    """Whether a constant of the operator is a Python number: a float, or an integer in place of a scalar or tensor."""
    schema = getattr(op.func, "_schema", None)
    if schema is None:
        return True
    types = {argument.name: str(argument.type) for argument in schema.arguments}
    given = [*zip(types, op.args, strict=False), *op.kwargs]
    return any(
        type(value) is float or (type(value) is int and types.get(name) in ("Tensor", "number", "Scalar"))
        for name, value in given
    )


def _differing_constants(old: Recording, new: Recording) -> list[int] | None:
    """The operators that differ in their constants; None if the programs differ in anything else."""
    if len(old.ops) != len(new.ops) or old.positions != new.positions:
        return None
    differing = []
    for before, after in zip(old.ops, new.ops, strict=True):
        if _shape(before) != _shape(after):
            return None
        if (before.args, before.kwargs) != (after.args, after.kwargs):
            differing.append(after.index)
    return differing


def _shape(op: RecordedOp) -> tuple[object, ...]:
    return op.name, op.outputs, tuple(op.references)
