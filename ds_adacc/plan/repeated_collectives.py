"""Which blocks' collectives backward calls again, by a second forward: the same ones on all ranks (Rule T8).

A rank that alone runs a second forward waits for collectives that the other ranks never call. So the ranks agree on the
names of such blocks when they plan. Until then every rank retains what such a block saves. A block that some rank could
not record is none of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ds_adacc import planner
from ds_adacc.execute.block import Block
from ds_adacc.plan.block_type import TypePlan


@dataclass(frozen=True)
class Repeatable:
    """What one rank tells of the blocks for which the program asks for checkpointing, by their names.

    `blocks`: those whose forward may run again there, with its collectives. `types`: for each block type whose second
    forward calls collectives, the names of its blocks by index.
    """

    blocks: frozenset[str] = frozenset()
    types: Mapping[str, Mapping[int, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, blocks: Iterable[Block], names: Callable[[str], Mapping[int, str]]) -> Repeatable:
        """What this rank tells of its `blocks`. `names`: of the blocks of a block type, by index."""
        asked = [(block.name, variant) for block in blocks for variant in block.asked_variants()]
        others = {name for name, each in asked if not each.repeats_collectives}
        digests = {each.digest for _, each in asked if each.repeats_collectives}
        return cls(frozenset(name for name, _ in asked) - others, {digest: names(digest) for digest in sorted(digests)})


class RepeatableByAll:
    """What follows from what each rank tells."""

    def __init__(self, everyone: Sequence[Repeatable]) -> None:
        self._by_all = frozenset.intersection(*(each.blocks for each in everyone))
        self._names: defaultdict[str, set[tuple[int, str]]] = defaultdict(set)  # of blocks, by block type
        for each in everyone:
            for digest, names in each.types.items():
                self._names[digest] |= names.items()

    def restrict(self, digest: str, profile: planner.Profile) -> planner.Profile:
        """The profile of a block type; without its second forward, if some rank cannot run that of a block of it."""
        if all(name in self._by_all for _, name in self._names[digest]):
            return profile
        ops = tuple(replace(op, replayable=False) for op in profile.graph.ops)
        return replace(profile, graph=replace(profile.graph, ops=ops))

    def repeated(self, before: frozenset[str], plans: Iterable[TypePlan]) -> frozenset[str]:
        """The names of the blocks of which all ranks run a second forward from now on.

        `before`: those of so far. They stay if none of the new `plans` has such a block.
        """
        decided, recomputed = set(), set()
        for each in plans:
            for index, name in self._names[each.spec.name]:
                decided.add(name)
                if each.spec.profile.graph.replayed(each.policy(index).stores):
                    recomputed.add(name)
        return (before - decided) | (recomputed & self._by_all)

    def superseded(self, plans: Iterable[TypePlan], planned: Collection[str]) -> frozenset[str]:
        """Those of the block types planned before whose blocks the new `plans` have at other sizes."""
        new = {each.spec.name for each in plans}
        decided = {name for digest in new for _, name in self._names[digest]}
        older = (digest for digest in planned if digest not in new)
        return frozenset(d for d in older if any(name in decided for _, name in self._names[d]))
