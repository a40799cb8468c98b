"""One block of the model, and a variant for each signature and guards under which it has been called."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ds_adacc import planner
from ds_adacc.execute.bound_policy import BoundPolicy
from ds_adacc.program.module_class import class_of
from ds_adacc.program.recording import Recording
from ds_adacc.program.signature import Signature, Sizes, differ_in_sizes, differing_numbers
from ds_adacc.python_state.changes import differing, is_number, moved
from ds_adacc.python_state.guards import Guards
from ds_adacc.python_state.places import Place
from ds_adacc.python_state.reading import Reading

_VARIANTS = 64  # a variant holds a plan; a block called with ever new shapes must not pile them up
_DISTINCT_NUMBERS, _DISTINCT_CONTAINERS = 3, 8  # a cache in a block may fill during the first steps, and then settle
_UNDISTURBED = 64  # calls with the recorded graphs, after which others that ran before are forgotten
_MOST_OTHER_GRAPHS = 3  # as soon as so many have run, nothing is replayed; a second length brings one
_MOST_MISPREDICTED = 1024  # block types; data may decide what it runs at each of its sizes
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
    `recording`: its program; None if the block could not be recorded, and then it runs under plain autograd.
    `policy`: what its calls run now: the plan's policy, or one that recomputes all it can while the plan's is on trial.
    `trial`: the policy that waits to be measured; `bound` then holds everything exactly.
    `outliers`: for each value that the outlier codec may hold, the channels by falling Z-score and how many are above
    the threshold, both on the device.
    `changes`: how often each number, container or other guard was found changed. `ignored`: those that are guarded no
    longer.
    `doubt`: what the block depends on that no guard watches; while there is anything, nothing is replayed (Rule E11).
    `is_predicted`: the program was recorded at other input sizes, and is predicted at these. `has_varied_numbers`:
    numbers among the arguments have varied. `is_unseen`: no call has confirmed the prediction yet. `failures`: how
    often the block could not be recorded under this signature.
    """

    guards: Guards | None = None
    digest: str = ""
    recording: Recording | None = None
    policy: planner.Policy | None = None
    trial: Trial | None = None
    outliers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    changes: Counter[str] = field(default_factory=Counter)
    ignored: frozenset[str] = frozenset()
    doubt: str = ""
    is_predicted: bool = False
    has_varied_numbers: bool = False
    is_unseen: bool = False
    failures: int = 0
    _bind: Callable[[Variant], BoundPolicy] | None = field(default=None, repr=False)
    _bound: BoundPolicy | None = field(default=None, repr=False)

    @classmethod
    def failed(cls, guards: Guards, earlier: Variant | None) -> Variant:
        """That of a block that could not be recorded under these guards. Under others it is tried again, a few times.

        `earlier`: the last variant of the same signature.
        """
        failures = 1 if earlier is None else earlier.failures + 1
        return cls(guards if failures < _ATTEMPTS else None, failures=failures)

    def bind_later(self, bind: Callable[[Variant], BoundPolicy]) -> None:
        """From the next call on, run under what `bind` returns for this variant.

        It is called when the policy is needed: of the sizes that a block has met, few come back before it changes.
        """
        self._bind, self._bound = bind, None

    @property
    def bound(self) -> BoundPolicy | None:
        """Its policy, ready to run, bound now if it is new; None if there is no recording."""
        if self._bind is not None:
            self._bound, self._bind = self._bind(self), None
        return self._bound

    def note_outliers(self, index: int, order: torch.Tensor, count: torch.Tensor, is_finite: torch.Tensor) -> None:
        """Note the channels of the value `index`, as `ds_adacc.kernels.rank_outliers` returns them.

        Data with Inf or NaN say nothing of where the outliers will be in the next batch: the channels before stay.
        """
        if index in self.outliers:
            before = (each.to(order.device) for each in self.outliers[index])
            order, count = (torch.where(is_finite, *pair) for pair in zip((order, count), before, strict=True))
        self.outliers[index] = order, count

    def at_other_sizes(self, guards: Guards, digest: str, recording: Recording) -> Variant:
        """A variant of the same program at other sizes of its inputs, without a policy yet.

        `recording` is the program at these sizes, and `digest` that of its block type. Where the last dimension of a
        value follows them, its channels are positions, and the outliers found at one size are none at another.
        """
        values = recording.values
        return Variant(
            guards,
            digest,
            recording,
            outliers={i: found for i, found in self.outliers.items() if len(found[0]) == values[i].channels},
            changes=self.changes,
            ignored=self.ignored,
            doubt=self.doubt,
            is_predicted=True,
            is_unseen=True,
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
        changed = moved(self.guards, guards, self.ignored) if self.ignored else None
        return bool(changed) and changed <= self.ignored

    def succeed(self, earlier: Variant) -> None:
        """Learn from the earlier variant of the same signature, of which something has changed (Rule E11).

        A number on a schedule, or a list that grows, would have the block recorded at every step. Once a number has
        been seen with three values, or a container with eight, it is guarded no longer. Then nothing is replayed: its
        next value may change any constant or choose another branch. Anything else that changes is only counted, for a
        warning.
        """
        self.changes, self.ignored, self.doubt = earlier.changes, earlier.ignored, earlier.doubt
        if earlier.guards is None or self.guards is None or earlier.guards == self.guards:
            return
        changed = moved(earlier.guards, self.guards, earlier.ignored)
        if changed is None:
            names = differing(earlier.guards, self.guards)
            first = next((name for name in names if name in earlier.guards and name in self.guards), "what it holds")
            self.changes = earlier.changes + Counter([first])
            return
        changed -= earlier.ignored
        self.changes = earlier.changes + Counter(changed)
        most = {name: _DISTINCT_NUMBERS if is_number(self.guards[name]) else _DISTINCT_CONTAINERS for name in changed}
        if changed and all(self.changes[name] >= count - 1 for name, count in most.items()):
            self.ignored = earlier.ignored | changed
            self.doubt = self.doubt or f"{_named(changed)}, which keeps changing"


class Block:
    """A block and its variants, at most 64; the least recently used is forgotten.

    `past`: its variants in the run that this one resumes, the last used first. `places`: the globals and class
    attributes that its functions were seen to read. `last_reading`: what was read of it at its last call.
    `mispredicted`: the block types that it was predicted to be of, and was not. It is recorded instead.
    `other_graphs`: how often another compiled graph than the recorded one has run of late, in a call of it or of a
    block with the same graphs.
    `begins_gradient`: it has returned what requires a gradient, though nothing that it was given or holds does.
    `is_one_of_many`: it is a function, and hundreds that differ only in what they hold were each called once.
    """

    def __init__(self, name: str, past: Sequence[Variant] = ()) -> None:
        self.name = name
        self.begins_gradient = self.is_one_of_many = False
        self.mispredicted: set[str] = set()
        self.other_graphs = 0
        self._undisturbed = 0
        self.places: dict[str, Place] = {}
        self.last_reading: Reading | None = None
        self._variants: list[tuple[Signature, Variant]] = []
        self._past = list(past)
        self._modules: list[weakref.ref[nn.Module]] = []

    def live_with(self, modules: Iterable[nn.Module]) -> None:
        """Forget all variants, and with them the parameters, as soon as one of the modules is gone (Rule E13)."""
        myself = weakref.ref(self)

        def forget(_: Any) -> None:
            block = myself()
            if block is not None:
                block._variants, block._past, block.last_reading = [], [], None

        self._modules = [weakref.ref(module, forget) for module in modules]

    @property
    def class_name(self) -> str:
        """The last word of its name, as "(Block)" of "blocks.0 (Block)": blocks of one class have it in common."""
        return self.name.split(" ")[-1]

    @property
    def kind(self) -> tuple[str, tuple[type, ...]]:
        """The classes of its modules; of a function, its name too."""
        classes = tuple(class_of(reference()) for reference in self._modules)
        return ("" if len(classes) == 1 else self.name), classes

    def find(self, signature: Signature, guards: Guards) -> Variant | None:
        """The variant for this signature and these guards."""
        for position, (known, variant) in enumerate(self._variants):
            if known == signature and variant.holds(guards):
                if position:
                    self._variants.insert(0, self._variants.pop(position))
                return variant
        return None

    def latest(self, signature: Signature) -> Variant | None:
        """The last used variant for this signature, whatever its guards."""
        return next((variant for known, variant in self._variants if known == signature), None)

    def relatives(self, signature: Signature, guards: Guards) -> dict[str, tuple[Variant, Sizes]]:
        """The variants whose signatures differ from this one, but only in sizes and strides; each with its sizes.

        By block type; the last used one is the first.
        """
        found: dict[str, tuple[Variant, Sizes]] = {}
        for known, variant in self._variants:
            if variant.recording is not None and variant.holds(guards) and differ_in_sizes(known, signature):
                found.setdefault(variant.digest, (variant, known.sizes))
        return found

    def changing_numbers(self, signature: Signature) -> dict[str, int]:
        """With how many values of each number among the arguments it was recorded; by the argument's name.

        That of a new call, which is about to be recorded, counts too.
        """
        values: dict[str, set[Any]] = {}
        for known in (known for known, variant in self._variants if not variant.is_predicted):
            for name, (before, now) in (differing_numbers(known, signature) or {}).items():
                values.setdefault(name, {now}).add(before)
        return {name: len(each) for name, each in values.items()}

    def forget(self, digests: Collection[str]) -> None:
        """Forget the variants of these block types."""
        self._variants = [(s, variant) for s, variant in self._variants if variant.digest not in digests]

    @property
    def keeps_changing_graphs(self) -> bool:
        """Whether other graphs have run so often that nothing of it is to be replayed."""
        return self.other_graphs >= _MOST_OTHER_GRAPHS

    def note_other_graphs(self, outdated: Collection[type], variant: Variant | None = None) -> None:
        """Other graphs of torch.compile have run than these. Forget this variant, and those that run one of these.

        The other ones take their place in calls of other sizes too, so the next call of each is recorded.
        """
        kept = [
            (signature, other)
            for signature, other in self._variants
            if other is not variant
            and not (other.recording is not None and any(run.cls in outdated for run in other.recording.graphs))
        ]
        if len(kept) < len(self._variants):
            self._variants = kept
            self.other_graphs, self._undisturbed = self.other_graphs + 1, 0

    def note_known_graphs(self) -> None:
        """A call has run the graphs of its variant, as far as it was looked at."""
        self._undisturbed += 1
        if self._undisturbed >= _UNDISTURBED:
            self.other_graphs = 0

    def note_mispredicted(self, variant: Variant) -> None:
        """Forget this variant, which has run another program than was predicted. It is not predicted so again."""
        self._variants = [(signature, other) for signature, other in self._variants if other is not variant]
        if len(self.mispredicted) >= _MOST_MISPREDICTED:
            self.mispredicted.clear()
        self.mispredicted.add(variant.digest)

    def add(self, signature: Signature, variant: Variant) -> None:
        """Keep a new variant, in place of those that held for the same calls."""
        others = [
            (s, r) for s, r in self._variants if not (s == signature and (r.guards is None or variant.holds(r.guards)))
        ]
        self._variants = [(signature, variant), *others][:_VARIANTS]

    def variants(self) -> list[Variant]:
        return [variant for _, variant in self._variants]

    def recall(self, recording: Recording) -> Variant | None:
        """The variant that the resumed run had of this program, which is handed out once; None if it had none."""
        for position, variant in enumerate(self._past):
            if recording.doubted(variant.doubt).digest == variant.digest:
                return self._past.pop(position)
        return None

    def to_plain(self) -> dict[str, Any]:
        """The name, the variants with a recording, and after them those of the resumed run that were not recalled."""
        known = [*(variant for variant in self.variants() if variant.recording is not None), *self._past][:_VARIANTS]
        on_host: dict[int, torch.Tensor] = {}
        return {"name": self.name, "records": [variant.to_plain(on_host) for variant in known]}

    @property
    def digests(self) -> set[str]:
        """The block types of its variants, and of the variants of the resumed run that were not recalled."""
        return {variant.digest for variant in (*self.variants(), *self._past)}

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Block:
        """The block that `to_plain` made `data` of, with its variants as the past."""
        return cls(data["name"], [Variant.from_plain(variant) for variant in data["records"]])


def _named(numbers: Collection[str]) -> str:
    first, *others = sorted(numbers)
    return f"{first} (and {len(others)} more)" if others else first
