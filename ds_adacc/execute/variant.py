"""A block under one signature and guards: the program that it runs then, and the policy for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_adacc import planner
from ds_adacc.execute.bound_policy import BoundPolicy
from ds_adacc.program.recording import Recording
from ds_adacc.python_state.changes import is_number, is_of_attributes, moved
from ds_adacc.python_state.guards import Guards

_DISTINCT_NUMBERS, _DISTINCT_CONTAINERS = 3, 8  # a cache in a block may fill during the first steps, and then settle
_ATTEMPTS = 3  # to record a block, by signature: one that never can be recorded may change its state at every call


@dataclass
class Trial:
    """A policy whose gradient error is measured in a step of trials or a tracking step (`runtime/trials.py`).

    `profile`: the one that the policy was made for, with the estimates of its errors. `has_begun`: a call is measuring
    it. `result`: the `PolicyError` that was measured; None before.
    """

    policy: planner.Policy
    profile: planner.Profile
    has_begun: bool = False
    result: Any = None


@dataclass
class Variant:
    """A block under one signature and these guards: the program that it runs then, and what is known of it.

    `guards`: the marks of what it depends on when it was recorded; None: any will do.
    `digest`: that of its recording, which names its block type.
    `policy`: what its calls run now: the plan's policy, or one that recomputes all it can while the plan's is on trial.
    `trial`: the policy that waits to be measured; `bound` then holds everything exactly.
    `outliers`: for each value that the outlier codec may hold, the channels by falling Z-score and how many are above
    the threshold, both on the device.
    `changes`: how often each number and container was found changed. `ignored`: those that are guarded no longer.
    `named`: the names in the code that ran while it was recorded; None: not known. `harmless`: how often each attribute
    that is a number, and that no such code names, was found changed while the program and its constants stayed the
    same. `decisive`: those with which alone the program has changed once; they are never harmless. `unread`: harmless
    ones that were seen with three values, such as the iteration among a script's arguments: they are guarded no longer.
    `doubt`: what the block depends on that no guard watches; while there is anything, nothing is replayed (Rule E11).
    `is_predicted`: the program was recorded at other input sizes, and is predicted at these. `has_varied_numbers`:
    numbers among the arguments have varied. `is_unseen`: no call has confirmed the prediction yet. `failures`: how
    often the block could not be recorded under this signature.
    """

    guards: Guards | None = None
    digest: str = ""
    policy: planner.Policy | None = None
    trial: Trial | None = None
    outliers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    changes: Counter[str] = field(default_factory=Counter)
    ignored: frozenset[str] = frozenset()
    named: frozenset[str] | None = None
    harmless: Counter[str] = field(default_factory=Counter)
    decisive: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()
    doubt: str = ""
    is_predicted: bool = False
    has_varied_numbers: bool = False
    is_unseen: bool = False
    failures: int = 0
    _recording: Recording | None = field(default=None, repr=False)
    _bind: Callable[[Variant], BoundPolicy] | None = field(default=None, repr=False)
    _bound: BoundPolicy | None = field(default=None, repr=False)

    @classmethod
    def failed(cls, guards: Guards, earlier: Variant | None) -> Variant:
        """That of a block that could not be recorded under these guards. Under others it is tried again, a few times.

        `earlier`: the last variant of the same signature.
        """
        failures = 1 if earlier is None else earlier.failures + 1
        return cls(guards if failures < _ATTEMPTS else None, failures=failures)

    @property
    def is_recorded(self) -> bool:
        """Whether it has a recording. A block that could not be recorded runs under plain autograd."""
        return self._recording is not None

    @property
    def repeats_collectives(self) -> bool:
        """Whether it is recorded, and its second forward calls collectives (Rule T8)."""
        return self._recording is not None and self._recording.repeats_collectives

    @property
    def recording(self) -> Recording:
        """Its program. Ask only a variant that `is_recorded`."""
        assert self._recording is not None
        return self._recording

    @recording.setter
    def recording(self, recording: Recording) -> None:
        self._recording = recording

    def bind_later(self, bind: Callable[[Variant], BoundPolicy]) -> None:
        """From the next call on, run under what `bind` returns for this variant.

        It is called when the policy is needed: of the sizes that a block has met, few come back before it changes.
        """
        self._bind, self._bound = bind, None

    @property
    def bound(self) -> BoundPolicy:
        """Its policy, ready to run, bound now if it is new. Ask only a variant that `is_recorded`."""
        if self._bind is not None:
            self._bound, self._bind = self._bind(self), None
        assert self._bound is not None  # a recorded variant gets a policy before its first call
        return self._bound

    def note_outliers(self, index: int, order: torch.Tensor, count: torch.Tensor, is_finite: torch.Tensor) -> None:
        """Note the channels of the value `index`, as `ds_adacc.kernels.rank_outliers` returns them.

        Data with Inf or NaN say nothing of where the outliers will be in the next batch: the channels before stay.
        """
        if index in self.outliers:
            before = (each.to(order.device) for each in self.outliers[index])
            order, count = (torch.where(is_finite, *pair) for pair in zip((order, count), before, strict=True))
        self.outliers[index] = order, count

    def at_other_sizes(self, guards: Guards, recording: Recording, has_varied_numbers: bool) -> Variant:
        """A variant of the same program at other sizes of its inputs, without a policy yet.

        `recording` is the program at these sizes. Where the last dimension of a value follows them, its channels are
        positions, and the outliers found at one size are none at another.
        """
        values = recording.values
        return Variant(
            guards,
            recording.digest,
            outliers={i: found for i, found in self.outliers.items() if len(found[0]) == values[i].channels},
            changes=self.changes,
            ignored=self.ignored,
            doubt=self.doubt,
            is_predicted=True,
            has_varied_numbers=has_varied_numbers,
            is_unseen=True,
            _recording=recording,
        )

    def to_plain(self, on_host: dict[int, torch.Tensor]) -> dict[str, Any]:
        """What a checkpoint keeps of it: plain containers, numbers, and tensors on the host.

        `on_host`: by the tensor's id, what other variants of the block have put there. Variants of one program at
        several sizes share their tensors, and a file that they are saved to has each of them once.
        """
        outliers = {}
        for index, (order, count) in self.outliers.items():
            if id(order) not in on_host:
                on_host[id(order)] = order.to("cpu", torch.int32)
            outliers[index] = on_host[id(order)], int(count)
        return {
            "block_type": self.digest,
            "outliers": outliers,
            "changes": dict(self.changes),
            "ignored": sorted(self.ignored),
            "doubt": self.doubt,
        }

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Variant:
        """The variant that `to_plain` made `data` of; it has no policy yet."""
        outliers = {
            i: (order.long(), torch.tensor(count, device="cpu")) for i, (order, count) in data["outliers"].items()
        }
        return cls(
            digest=data["block_type"],
            outliers=outliers,
            changes=Counter(data["changes"]),
            ignored=frozenset(data["ignored"]),
            doubt=data["doubt"],
        )

    def holds(self, guards: Guards) -> bool:
        """Whether the block runs the recorded program when what it depends on has these marks."""
        if self.guards is None or self.guards is guards:
            return True
        if self.guards == guards:
            self.guards = guards  # those of the next call are the same object, unless something changes
            return True
        if not (self.ignored or self.unread):
            return False
        changed = moved(self.guards, guards, self.ignored)
        if changed and changed <= self.unread:
            self.guards = guards
        return bool(changed) and changed <= self.ignored | self.unread

    def _unnamed(self, numbers: Collection[str]) -> set[str]:
        """Those of the numbers that an object or a module keeps as attributes which no code of the block names."""
        if self.named is None or self.guards is None:
            return set()
        parts = ((name, *name.rpartition(".")) for name in numbers)
        return {
            name
            for name, owner, _, key in parts
            if key.isidentifier() and key not in self.named and is_number(self.guards.get(name))
            if is_of_attributes(self.guards.get(owner))
        }

    def learn_at_other_sizes(self, earlier: Variant, is_alike: bool) -> None:
        """Learn from the last variant at other sizes which numbers make no difference, though no code names them.

        Where lengths vary, a length may not come thrice for a long time. `is_alike`: the same operators ran, with the
        same constants.
        """
        self.harmless, self.decisive = earlier.harmless, earlier.decisive
        self.unread = frozenset(self._unnamed(earlier.unread))
        if not is_alike or earlier.guards is None or self.guards is None:
            return
        changed = (moved(earlier.guards, self.guards, earlier.ignored) or set()) - earlier.ignored - self.unread
        unnamed = self._unnamed(changed) & earlier._unnamed(changed)
        if changed <= unnamed - self.decisive:
            self.harmless = earlier.harmless + Counter(changed)
            self.unread |= {name for name in changed if self.harmless[name] >= _DISTINCT_NUMBERS - 1}

    def succeed(self, earlier: Variant, had_settled: bool, is_same_program: bool) -> None:
        """Learn from the earlier variant of the same signature, of which something has changed (Rule E11).

        A number on a schedule, or a list that grows, would have the block recorded at every step. Once a number has
        been seen with three values, or a container with eight, it is guarded no longer. Then nothing is replayed: its
        next value may change any constant or choose another branch. If the block `had_settled` before this change, the
        changes until then do not count: to record it now and then takes little time.

        `is_same_program`: what was recorded is as before, with all constants. A number that no code names is guarded no
        longer once three values of it have made no difference, unless it has made one alone. Then replays go on.
        """
        self.changes, self.ignored, self.doubt = earlier.changes, earlier.ignored, earlier.doubt
        self.harmless, self.decisive = earlier.harmless, earlier.decisive
        self.unread = frozenset(self._unnamed(earlier.unread))
        if earlier.guards is None or self.guards is None or earlier.guards == self.guards:
            return
        changed = moved(earlier.guards, self.guards, earlier.ignored)
        if changed is None:
            return
        changed -= earlier.ignored | self.unread
        unnamed = self._unnamed(changed) & earlier._unnamed(changed)
        if not is_same_program and changed <= unnamed:
            self.decisive |= changed
        harmless = unnamed - self.decisive if is_same_program else set[str]()
        self.harmless = earlier.harmless + Counter(harmless)
        self.unread |= {name for name in harmless if self.harmless[name] >= _DISTINCT_NUMBERS - 1}
        changed -= harmless
        self.changes = Counter(changed) if had_settled else earlier.changes + Counter(changed)
        most = {name: _DISTINCT_NUMBERS if is_number(self.guards[name]) else _DISTINCT_CONTAINERS for name in changed}
        if changed and all(self.changes[name] >= count - 1 for name, count in most.items()):
            self.ignored = earlier.ignored | changed
            self.doubt = self.doubt or f"{in_short(changed - unnamed or changed)}, which keeps changing"


def in_short(names: Collection[str]) -> str:
    """The first of the names, and how many more there are."""
    first, *others = sorted(names)
    return f"{first} (and {len(others)} more)" if others else first
