"""Block types whose input sizes vary: one program at several sizes, and what it would be at others."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ds_adacc import planner
from ds_adacc.program.signature import Sizes
from ds_adacc.sizes.symbolic_profile import SymbolicProfile
from ds_adacc.sizes.symbolic_program import Example, SymbolicProgram

_MOST_CONSTANTS = 1024  # a schedule makes new ones all the time
_MOST = 256  # programs; those of a block that is recorded anew at every step must not pile up

Constants = tuple[float, ...]  # with which a block computes


@dataclass(eq=False)
class SymbolicType:
    """One program with its sizes left open.

    `recorded`: the block types that were recorded of it, by their sizes; `predicted`: those that were predicted.
    `constants`: those of the blocks that were recorded at two sizes, and had the same ones there. Another block may
    compute its constants from the sizes. `was_mistaken`: a call saved something else than was predicted once.
    `origin`: the block type whose policies the other sizes adopt; None before one was planned for. `origin_bytes`: the
    peak without checkpointing of the live set that it was planned in.
    """

    program: SymbolicProgram
    profile: SymbolicProfile
    recorded: dict[Sizes, str] = field(default_factory=dict)
    predicted: dict[Sizes, str] = field(default_factory=dict)
    constants: set[Constants] = field(default_factory=set)
    was_mistaken: bool = False
    origin: str | None = None
    origin_bytes: int = 0

    def at(self, sizes: Sizes) -> str | None:
        """The block type at these sizes, if it was recorded or predicted before."""
        known = {**self.predicted, **self.recorded}
        same = (name for its, name in known.items() if self.program.is_same(sizes, its))
        return known.get(sizes) or next(same, None)

    def sizes(self, digest: str) -> tuple[int, ...]:
        """The sizes of the block type; () if they are not known."""
        known = (*self.recorded.items(), *self.predicted.items())
        found = next((sizes for sizes, name in known if name == digest), None)
        return () if found is None else (*found.lengths, *found.numbers)

    def is_at_least(self, digest: str, other: str) -> bool:
        """Whether all sizes of this block type are known to be at least those of the other one."""
        one, two = self.sizes(digest), self.sizes(other)
        return 0 < len(one) == len(two) and all(map(operator.ge, one, two))


class SymbolicTypes:
    """The programs met so far, by the block types that are sizes of them."""

    def __init__(self) -> None:
        self._types: dict[str, SymbolicType] = {}
        self._by_use: OrderedDict[SymbolicType, None] = OrderedDict()  # the last used one is last

    def of(self, digest: str | None) -> SymbolicType | None:
        """The program of which this block type is a size; None if it is not known."""
        return None if digest is None else self._types.get(digest)

    def first_of_each(self, digests: Iterable[str], distance: Callable[[str], float] = lambda _: 0.0) -> list[str]:
        """Of each known program, the first of these block types. A program in which fewer sizes vary comes first.

        Torch may run other operators for a batch of one text, say. The program of such batches then tells what a
        further one runs, and that of all other batches may seem to. Of others, the program comes first one of whose
        block types has the least `distance`: a block that branches on a length does as at lengths near it.
        """
        of_each: dict[SymbolicType, list[str]] = {}
        for digest in digests:
            if (known := self._types.get(digest)) is not None:
                of_each.setdefault(known, []).append(digest)

        def order(known: SymbolicType) -> tuple[int, float]:
            return known.program.varying, min(map(distance, of_each[known]))

        # Most blocks run one program, at dozens of sizes: no distance is worked out for these.
        programs = sorted(of_each, key=order) if len(of_each) > 1 else of_each
        return [of_each[known][0] for known in programs]

    def like(self, relatives: Mapping[str, Constants], example: Example) -> str | None:
        """The first of these block types whose program the recording is at other sizes; None if it is of none.

        `relatives`: as of `learn`. Constants that are computed from the sizes make it another program at each size.
        """
        alike = _alike(relatives, example)
        return next((each for each in self.first_of_each(alike) if self._types[each].program.is_of(example)), None)

    def profile(self, like: str | None, example: Example) -> planner.Profile | None:
        """The profile of a recording, which is the program of `like` at other sizes, if two of them were measured."""
        known = self.of(like)
        return None if known is None else known.profile.at(example.sizes, example.recording)

    def learn(self, example: Example, profile: planner.Profile, relatives: Mapping[str, Constants]) -> None:
        """Learn from a recording, whose block type has this profile.

        `relatives`: the block types that the recorded block has at other sizes, and its constants there.
        """
        digest, constants = example.recording.digest, example.recording.constants
        known = self._types.get(digest)
        if known is None:
            known = self._add_recorded(example, profile, self.like(relatives, example))
        else:  # recorded with other numbers, perhaps: these have no part in the program
            first = next((its for its, name in known.recorded.items() if name == digest), example.sizes)
            known.program.note_equal(example.sizes, first)
        alike = _alike(relatives, example)
        if self._computes_constants(relatives.keys() - alike, example):
            for each in filter(None, map(self.of, (*relatives, digest))):
                each.constants.difference_update((*relatives.values(), constants))
        elif alike:
            if len(known.constants) >= _MOST_CONSTANTS:
                known.constants.clear()
            known.constants.add(constants)

    def _add_recorded(self, example: Example, profile: planner.Profile, like: str | None) -> SymbolicType:
        """Add a new block type that was recorded: to the program of `like`, or to a new one if it is of none."""
        known = self.of(like)
        if known is None or not known.program.learn(example):
            known = SymbolicType(SymbolicProgram(example), SymbolicProfile())
        known.profile.learn(example.sizes, example.recording, profile)
        known.recorded[example.sizes] = example.recording.digest
        self._add(example.recording.digest, known)
        if len(self._by_use) > _MOST:
            forgotten, _ = self._by_use.popitem(last=False)
            self._types = {name: each for name, each in self._types.items() if each is not forgotten}
        return known

    def _computes_constants(self, digests: Iterable[str], example: Example) -> bool:
        """Whether a block seems to compute constants from its sizes: these block types of it have others.

        One of them is the program of the example, and was predicted wrongly once. Where nothing was, the constants may
        be those of a few branches, each for a range of sizes.
        """
        known = (self._types[digest] for digest in self.first_of_each(digests))
        return any(each.was_mistaken and each.program.is_of(example) for each in known)

    def note_predicted(self, digest: str, like: str, sizes: Sizes) -> None:
        """Note that this block type is predicted to be the program of `like` at these sizes."""
        known = self._types[like]
        self._add(digest, known)
        known.predicted[sizes] = digest

    def note_mistake(self, digest: str, has_varied_numbers: bool) -> None:
        """A call has run another program than was predicted. `has_varied_numbers`: those in its arguments may be why.

        The program is predicted at no further sizes until a recording confirms how it follows them.
        """
        known = self._types.get(digest)
        if known is None:
            return
        known.program.note_mistake()
        known.predicted = {}
        known.was_mistaken |= not has_varied_numbers

    def forget(self, digests: Iterable[str]) -> None:
        """Forget these predicted block types. Those that were recorded stay."""
        for name in digests:
            known = self._types.get(name)
            if known is not None:
                known.predicted = {sizes: other for sizes, other in known.predicted.items() if other != name}
            if known is not None and name not in known.recorded.values():
                del self._types[name]

    def note_use(self, digest: str) -> None:
        """A block of this type has run."""
        known = self._types.get(digest)
        if known is not None:
            self._by_use.move_to_end(known)

    def _add(self, digest: str, known: SymbolicType) -> None:
        self._types[digest] = known
        self._by_use[known] = None
        self._by_use.move_to_end(known)

    @property
    def recorded(self) -> set[str]:
        """The block types from which others are predicted."""
        return {name for known in self._types.values() for name in known.recorded.values()}


def _alike(relatives: Mapping[str, Constants], example: Example) -> list[str]:
    """Those of the block types at which the block has the constants that it has in the example."""
    return [name for name, constants in relatives.items() if constants == example.recording.constants]
