"""In what order one forward runs the blocks: the one place that knows a block's index."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ds_adacc.execute.block import Block
from ds_adacc.plan.plan import LiveSet, Orders


@dataclass(frozen=True)
class ForwardPass:
    """The calls of one forward, by block type and block, that were alive when backward began.

    `reversed`: backward took them last first, and no other call came between.
    """

    calls: tuple[tuple[str, Block], ...]
    reversed: bool

    @property
    def block_types(self) -> frozenset[str]:
        return frozenset(block_type for block_type, _ in self.calls)

    @property
    def order(self) -> tuple[str, ...]:
        """The block type of each call in forward order; () unless backward reverses it."""
        return tuple(block_type for block_type, _ in self.calls) if self.reversed else ()

    def blocks(self, block_type: str) -> list[Block]:
        """The blocks of this type in the order of their first calls."""
        return list(dict.fromkeys(block for name, block in self.calls if name == block_type))

    def calls_per_block(self, block_type: str) -> int:
        """How often each block of this type was called. If that differs: all the calls, as if of one block."""
        each = Counter(id(block) for name, block in self.calls if name == block_type)
        return each.popitem()[1] if len(set(each.values())) == 1 else each.total()


class ForwardOrder:
    """Learns from forward passes which block comes when.

    `orders` holds, for each live set, the block type of every block in forward order; () where backward does not take
    them in reverse. The ranks exchange it: an order is planned with only where all ranks agree on it.
    """

    def __init__(self) -> None:
        self.orders: Orders = {}
        self._indices: weakref.WeakKeyDictionary[Block, dict[str, int]] = weakref.WeakKeyDictionary()

    def index(self, block: Block, block_type: str) -> int | None:
        """The block's index among those of its type, from 0; None if no pass has shown it yet."""
        return self._indices.get(block, {}).get(block_type)

    def learn(self, seen: ForwardPass, known: Collection[str]) -> None:
        """Take the order from a pass, for those of its block types that are `known` here."""
        block_types = seen.block_types.intersection(known)
        self.orders = {**self.orders, block_types: seen.order}
        for indices in self._indices.values():
            for block_type in block_types & indices.keys():
                del indices[block_type]
        for block_type in block_types:
            for index, block in enumerate(seen.blocks(block_type)):
                self._indices.setdefault(block, {})[block_type] = index

    def keep(self, names: Collection[str]) -> None:
        """Forget all other block types: the orders of live sets with one, and the indices of their blocks."""
        for block, indices in self._indices.items():
            self._indices[block] = {name: index for name, index in indices.items() if name in names}
        self.orders = {live_set: order for live_set, order in self.orders.items() if live_set <= set(names)}

    def indices(self, block: Block) -> dict[str, int]:
        """The block's index for each block type that it runs."""
        return dict(self._indices.get(block, {}))

    def restore(
        self,
        orders: Mapping[LiveSet, tuple[str, ...]],
        blocks: Sequence[Block],
        indices: Sequence[Mapping[str, int]],
    ) -> None:
        """Go on from these orders, and from what `indices` told of each of the blocks."""
        self.orders = dict(orders)
        self._indices = weakref.WeakKeyDictionary()
        for block, known in zip(blocks, indices, strict=True):
            self._indices[block] = dict(known)
