"""A block under one signature and guards: the program that it runs then, and the policy for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_adacc import planner
from ds_adacc.execute.bound_policy import BoundPolicy
from ds_adacc.program.recording import Recording
from ds_adacc.python_state.guard_history import GuardHistory
from ds_adacc.python_state.guards import Guards

_ATTEMPTS = 3  # to record a block, by signature: one that never can be recorded may change its state at every call


@dataclass
class Trial:
    """A policy whose gradient error is measured in a step of trials or a tracking step (`steps/trials.py`).

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

    `history`: the guards under which it was recorded, and what is known of them.
    `digest`: that of its recording, which names its block type.
    `policy`: what its calls run now: the plan's policy, or one that recomputes all it can while the plan's is on trial.
    `trial`: the policy that waits to be measured; `bound` then holds everything exactly.
    `outliers`: for each value that the outlier codec may hold, the channels by falling Z-score and how many are above
    the threshold, both on the device.
    `is_predicted`: the program was recorded at other input sizes, and is predicted at these. `has_varied_numbers`:
    numbers among the arguments have varied. `is_unseen`: no call has confirmed the prediction yet. `failures`: how
    often the block could not be recorded under this signature.
    """

    history: GuardHistory = field(default_factory=GuardHistory)
    digest: str = ""
    policy: planner.Policy | None = None
    trial: Trial | None = None
    outliers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
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
        return cls(GuardHistory(guards if failures < _ATTEMPTS else None), failures=failures)

    @property
    def guards(self) -> Guards | None:
        """The marks of what it depends on when it was recorded; None: any will do."""
        return self.history.guards

    @property
    def doubt(self) -> str:
        """What it depends on that no guard watches; while there is anything, nothing is replayed (Rule E11)."""
        return self.history.doubt

    def holds(self, guards: Guards) -> bool:
        """Whether the block runs the recorded program when what it depends on has these marks."""
        return self.history.holds(guards)

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
            self.history.at_other_sizes(guards),
            recording.digest,
            outliers={i: found for i, found in self.outliers.items() if len(found[0]) == values[i].channels},
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
        return {"block_type": self.digest, "outliers": outliers, **self.history.to_plain()}

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Variant:
        """The variant that `to_plain` made `data` of; it has no policy yet."""
        outliers = {
            i: (order.long(), torch.tensor(count, device="cpu")) for i, (order, count) in data["outliers"].items()
        }
        return cls(GuardHistory.from_plain(data), data["block_type"], outliers=outliers)
