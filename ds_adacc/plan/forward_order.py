"""The order in which a forward runs the blocks. No other module assigns a block's index."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ds_adacc.execute.block import Block
from ds_adacc.plan.live_sets import Alive, Orders


@dataclass(frozen=True)
class ForwardPass:
    """The calls of one forward that were alive when backward began, each with its block type and block.

    `reversed`: backward ran the calls in reverse order, and no other call ran between them.
    """

    calls: tuple[tuple[str, Block], ...]
    reversed: bool

    @property
    def digests(self) -> frozenset[str]:
        return frozenset(digest for digest, _ in self.calls)

    @property
    def order(self) -> tuple[str, ...]:
        """The block type of each call in forward order; () unless backward reverses it."""
        return tuple(digest for digest, _ in self.calls) if self.reversed else ()

    def blocks(self, digest: str) -> list[Block]:
        """The blocks of this type in the order of their first calls."""
        return list(dict.fromkeys(block for name, block in self.calls if name == digest))

    def equal_blocks(self, digest: str) -> int:
        """How many blocks of this type were called, if each was called equally often; else 1."""
        calls = Counter(id(block) for name, block in self.calls if name == digest)
        return len(calls) if len(set(calls.values())) == 1 else 1


class ForwardOrder:
    """Learns the order of the blocks from forward passes.

    `orders` holds, for each live set, the block type of every call in forward order; () if backward does not run the
    calls in reverse. The ranks exchange `orders`: the planner uses an order only if all ranks agree on it.
    """

    def __init__(self) -> None:
        self.restore({}, {})

    def index(self, block: Block, digest: str) -> int | None:
        """The block's index among the blocks of its type, from 0. None if no forward pass has included it yet."""
        return self._indices.get(block, {}).get(digest)

    def names(self, digest: str) -> dict[int, str]:
        """The names of the blocks of this type by index, in forward order."""
        found = [(indices[digest], block.name) for block, indices in self._indices.items() if digest in indices]
        return dict(sorted(found))

    def learn(self, seen: ForwardPass, known: Collection[str]) -> set[str]:
        """Learn the order from a forward pass, for its block types that are in `known`.

        A block that the pass has left out, as LayerDrop leaves out some, keeps its place among the others. Returns the
        block types of which a block has another index now.
        """
        digests = seen.digests.intersection(known)
        self.orders = {**self.orders, digests: seen.order}
        elsewhere = {block for _, block in seen.calls}  # in the pass, perhaps as another block type
        reindexed = set()
        for digest in digests:
            before = {block: indices[digest] for block, indices in self._indices.items() if digest in indices}
            now = seen.blocks(digest)
            kept = [block for block in sorted(before, key=before.__getitem__) if block in now or block not in elsewhere]
            for block in before:
                del self._indices[block][digest]
            for index, block in enumerate(_merged(kept, now)):
                self._indices.setdefault(block, {})[digest] = index
                if before.get(block, index) != index:
                    reindexed.add(digest)
        return reindexed

    def copy_indices(self, digest: str, like: str) -> None:
        """Give the blocks the same indices for this block type as for the type `like`."""
        for indices in self._indices.values():
            if like in indices:
                indices[digest] = indices[like]

    def copy_order(self, alive: Alive, like: Mapping[str, str]) -> None:
        """Give a live set the order of another one, if each block type has as many calls as its like."""
        order, back = self.orders.get(frozenset(like.values()), ()), {other: name for name, other in like.items()}
        if len(back) == len(like) and all(order.count(like[name]) == calls for name, calls in alive.items()):
            self.orders = {**self.orders, frozenset(alive): tuple(back[other] for other in order)}

    def forget(self, names: Collection[str]) -> None:
        """Forget the blocks' indices for these block types. The next plan forgets their orders."""
        for indices in self._indices.values():
            for name in names & indices.keys():
                del indices[name]

    def forget_all_but(self, names: Collection[str]) -> None:
        """Forget all block types not in `names`: the orders of live sets with one, and their blocks' indices."""
        for block, indices in self._indices.items():
            self._indices[block] = {name: index for name, index in indices.items() if name in names}
        self.orders = {live_set: order for live_set, order in self.orders.items() if live_set <= set(names)}

    def indices(self, block: Block) -> dict[str, int]:
        """The block's index for each block type that it runs."""
        return dict(self._indices.get(block, {}))

    def restore(self, orders: Orders, indices: Mapping[Block, Mapping[str, int]]) -> None:
        """Restore these orders, and for each block what `indices` returned."""
        self.orders: Orders = dict(orders)
        self._indices: weakref.WeakKeyDictionary[Block, dict[str, int]] = weakref.WeakKeyDictionary()
        for block, known in indices.items():
            self._indices[block] = dict(known)


def _merged(known: Sequence[Block], seen: Sequence[Block]) -> list[Block]:
    """Both, each block once: new ones come after the one that they follow in `seen`, whose order counts."""
    if [block for block in known if block in seen] != [block for block in seen if block in known]:
        return [*seen, *(block for block in known if block not in seen)]
    merged, place = list(known), 0
    for block in seen:
        if block in known:
            place = merged.index(block) + 1
        else:
            merged.insert(place, block)
            place += 1
    return merged
