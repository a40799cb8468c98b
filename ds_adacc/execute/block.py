"""One block of the model, and a variant for each signature and guards under which it has been called."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ds_adacc.execute.variant import Variant
from ds_adacc.program.module_class import class_of
from ds_adacc.program.recording import Recording
from ds_adacc.program.signature import Signature, Sizes, differ_in_sizes, differing_numbers
from ds_adacc.python_state.changes import names_of_changes
from ds_adacc.python_state.guards import Guards
from ds_adacc.python_state.places import Place
from ds_adacc.python_state.reading import Reading

_VARIANTS = 64  # a variant holds a plan; a block called with ever new shapes must not pile them up
_SIZES_TRIED = 8  # at which a block could not be recorded: to try takes dozens of times as long as a call
_UNDISTURBED = 64  # calls with the recorded graphs, after which others that ran before are forgotten
_SETTLED = 64  # calls without a change, after which earlier changes do not count
_MOST_OTHER_GRAPHS = 3  # as soon as so many have run, nothing is replayed; a second length brings one
_MOST_MISPREDICTED = 1024  # block types; data may decide what it runs at each of its sizes


class Block:
    """A block and its variants, at most 64; the least recently used is forgotten.

    `past`: its variants in the run that this one resumes, the last used first.
    `places`: the globals and class attributes that its functions were seen to read.
    `last_reading`: what was read of it at its last call.
    `mispredicted`: the block types that it was predicted to be of, and was not. It is recorded instead.
    `other_graphs`: how often another compiled graph than the recorded one has run of late, in a call of it or of a
    block with the same graphs.
    `changes`: by name, how often it was recorded and this had changed since its last call, of whatever sizes.
    `calls_since_change`: how often it was called since anything had changed so. `had_settled`: the last change came
    after 64 calls without one, so those before it do not count.
    `begins_gradient`: it has returned what requires a gradient, though nothing that it was given or holds does.
    `differentiates`: whether it was seen to run a backward in its forward.
    `effects`: what a second forward of it has changed of what it depends on; None: nothing so far (Rule E17).
    `calls_blocks`: it is a function that the program has given to `checkpoint`, and it calls blocks of an engine, which
    are checkpointed in its place; None: that is not known yet.
    `is_always_new`: it is a function, and a thousand were called since another one that was never called again.
    """

    def __init__(self, name: str, past: Sequence[Variant] = ()) -> None:
        self.name = name
        self.begins_gradient = self.is_always_new = self.differentiates = False
        self.effects: str | None = None
        self.calls_blocks: bool | None = None
        self.mispredicted: set[str] = set()
        self.other_graphs = 0
        self._undisturbed = 0
        self.changes: Counter[str] = Counter()
        self.calls_since_change = 0
        self.had_settled = False
        self.places: dict[str, Place] = {}
        self.last_reading: Reading | None = None
        self._variants: list[tuple[Signature, Variant]] = []
        self._past = list(past)
        self._modules: list[weakref.ref[nn.Module]] = []

    def live_with(self, modules: Iterable[nn.Module]) -> None:
        """Forget all variants as soon as one of the modules is gone (Rule E13)."""
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
    def kind(self) -> tuple[str, tuple[type | None, ...]]:
        """The classes of its modules, None for one that is gone; of a function, the last word of its name too."""
        modules = (reference() for reference in self._modules)
        classes = tuple(None if module is None else class_of(module) for module in modules)
        return ("" if len(classes) == 1 else self.class_name), classes

    def find(self, signature: Signature, guards: Guards) -> Variant | None:
        """The variant for this signature and these guards; None if there is none.

        A block that could not be recorded at several sizes is not tried at further ones: a variant of one of those
        sizes stands for all.
        """
        for position, (known, variant) in enumerate(self._variants):
            if known == signature and variant.holds(guards):
                if position:
                    self._variants.insert(0, self._variants.pop(position))
                return variant
        failed: list[Variant] = []
        for known, variant in self._variants:
            if differ_in_sizes(known, signature):
                if variant.is_recorded:
                    return None
                if variant.holds(guards):
                    failed.append(variant)
        return failed[0] if len(failed) >= _SIZES_TRIED else None

    def latest(self, signature: Signature) -> Variant | None:
        """The last used variant for this signature, whatever its guards."""
        return next((variant for known, variant in self._variants if known == signature), None)

    def recorded_at_other_sizes(self, signature: Signature) -> list[Variant]:
        """The variants that were recorded at other sizes, with all else in the signature the same; last used first."""
        recorded = ((known, each) for known, each in self._variants if each.is_recorded and not each.is_predicted)
        return [each for known, each in recorded if differ_in_sizes(known, signature)]

    def asked_variants(self) -> list[Variant]:
        """The variants of calls for which the program has asked for checkpointing."""
        return [variant for signature, variant in self._variants if signature.is_asked]

    def relatives(self, signature: Signature, guards: Guards) -> dict[str, tuple[Variant, Sizes]]:
        """The variants whose signatures differ from this one, but only in sizes and strides; each with its sizes.

        By block type; the last used one is the first.
        """
        found: dict[str, tuple[Variant, Sizes]] = {}
        for known, variant in self._variants:
            if variant.is_recorded and variant.holds(guards) and differ_in_sizes(known, signature):
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

    def recorded_sizes(self, signature: Signature, guards: Guards) -> int:
        """At how many sizes of its tensors it was recorded, with all else the same; 0 if it was predicted at another.

        That of a new call, which is about to be recorded, counts too.
        """
        numbers = signature.sizes.numbers
        alike = [
            variant
            for known, variant in self._variants
            if known.sizes.numbers == numbers and variant.holds(guards) and differ_in_sizes(known, signature)
        ]
        is_predicted = any(variant.is_predicted for variant in alike)
        return 0 if is_predicted else 1 + sum(variant.is_recorded for variant in alike)

    def note_changes(self, guards: Guards) -> set[str]:
        """Note what has changed since its last call, now that it is recorded under these guards. Returns the names."""
        last = next((variant for _, variant in self._variants), None)
        if last is None or last.guards is None:
            return set()
        changed = names_of_changes(last.guards, guards, last.history.ignored)
        if changed:
            self.had_settled = self.calls_since_change > _SETTLED  # this call is one of them
            self.calls_since_change = 0
            if self.had_settled:
                self.changes.clear()
            self.changes.update(changed)
        return changed

    def note_effects(self, effects: str) -> None:
        """A second forward has changed this. There is none any more: the next call is recorded, by its operators.

        If it calls collectives, it stays: the other ranks still run theirs (Rule T8).
        """
        self.effects = effects
        self._drop(lambda v: v.is_recorded and v.recording.is_whole and not v.repeats_collectives)

    def forget(self, digests: Collection[str]) -> None:
        """Forget the variants of these block types."""
        self._drop(lambda variant: variant.digest in digests)

    def _drop(self, is_dropped: Callable[[Variant], bool]) -> bool:
        """Drop these variants. Returns whether there were any."""
        before = len(self._variants)
        self._variants = [(signature, each) for signature, each in self._variants if not is_dropped(each)]
        return len(self._variants) < before

    @property
    def keeps_changing_graphs(self) -> bool:
        """Whether other graphs have run so often that nothing of it is to be replayed."""
        return self.other_graphs >= _MOST_OTHER_GRAPHS

    def note_other_graphs(self, outdated: Collection[type], variant: Variant | None = None) -> None:
        """Other graphs of torch.compile have run than these. Forget this variant, and those that run one of these.

        The other ones take their place in calls of other sizes too, so the next call of each is recorded.
        """

        def is_outdated(other: Variant) -> bool:
            graphs = other.recording.graphs if other.is_recorded else ()
            return other is variant or any(run.cls in outdated for run in graphs)

        if self._drop(is_outdated):
            self.other_graphs, self._undisturbed = self.other_graphs + 1, 0

    def note_known_graphs(self) -> None:
        """A call has run the graphs of its variant, as far as it was looked at."""
        self._undisturbed += 1
        if self._undisturbed >= _UNDISTURBED:
            self.other_graphs = 0

    def note_mispredicted(self, variant: Variant) -> None:
        """Forget this variant, which has run another program than was predicted. It is not predicted so again."""
        self._drop(lambda other: other is variant)
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
        known = [*(variant for variant in self.variants() if variant.is_recorded), *self._past][:_VARIANTS]
        on_host: dict[int, torch.Tensor] = {}
        records = [variant.to_plain(on_host) for variant in known]
        settled = {"calls_since_change": self.calls_since_change, "had_settled": self.had_settled}
        return {"name": self.name, "records": records, **settled}

    @property
    def digests(self) -> set[str]:
        """The block types of its variants, and of the variants of the resumed run that were not recalled."""
        return {variant.digest for variant in (*self.variants(), *self._past)}

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Block:
        """The block that `to_plain` made `data` of, with its variants as the past."""
        block = cls(data["name"], [Variant.from_plain(variant) for variant in data["records"]])
        block.calls_since_change, block.had_settled = data["calls_since_change"], data["had_settled"]
        return block
