"""What is to be planned: block types, which of them are alive together, and in what order."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import groupby

from ds_adacc.planner.profile import BlockType


@dataclass(frozen=True)
class Problem:
    """Block types that share one budget.

    `live_sets` are the sets of block types, by name, whose calls are alive at once: each has the whole budget, and a
    block type in several has the same policies in all; none given: all are. `order` names the block type of every block
    in forward order, if backward is known to take the blocks in reverse; none given: it may take them in any.
    `max_gradient_error` bounds the estimated relative error of each block's gradient, the root of the sum of squares
    over what is compressed.

    Raises ValueError, naming the culprit, for block types, sets or an order that do not fit together.
    """

    block_types: tuple[BlockType, ...]
    live_sets: tuple[frozenset[str], ...] = ()
    order: tuple[str, ...] = ()
    max_gradient_error: float | None = None

    def __post_init__(self) -> None:
        names = [block_type.name for block_type in self.block_types]
        if not names:
            raise ValueError("block types is empty; give at least one block type")
        if len(set(names)) < len(names):
            raise ValueError(f"block types are named {names}; give each a name of its own")
        self._check_live_sets(set(names))
        if self.order:
            self._check_order()
        bound = self.max_gradient_error
        if bound is not None and not (math.isfinite(bound) and bound >= 0):
            raise ValueError(f"max_gradient_error is {bound!r}; it must be finite and non-negative")

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The sets alive together, as indices into `block_types`."""
        if not self.live_sets:
            return (tuple(range(len(self.block_types))),)
        places = {block_type.name: place for place, block_type in enumerate(self.block_types)}
        return tuple(tuple(sorted(places[name] for name in names)) for names in self.live_sets)

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """The order as (index into `block_types`, number of blocks in a row)."""
        places = {block_type.name: place for place, block_type in enumerate(self.block_types)}
        return tuple((places[name], len(list(row))) for name, row in groupby(self.order))

    def _check_live_sets(self, names: set[str]) -> None:
        if not self.live_sets:
            return
        if not all(self.live_sets):
            raise ValueError("live_sets has an empty set; name block types in each")
        named = frozenset().union(*self.live_sets)
        if unknown := sorted(named - names):
            raise ValueError(f"live_sets names {unknown[0]!r}; the block types are {sorted(names)}")
        if missing := sorted(names - named):
            raise ValueError(
                f"live_sets has no set with block type {missing[0]!r}; name each block type in one, or in several"
            )

    def _check_order(self) -> None:
        if len(self.groups) > 1:
            raise ValueError("order is given, and several sets are alive together; give an order to one set only")
        wanted = {block_type.name: block_type.blocks for block_type in self.block_types}
        if shared := [block_type.name for block_type in self.block_types if block_type.calls_per_block > 1]:
            raise ValueError(f"order is given, but each block of block type {shared[0]!r} is called more than once")
        if (named := Counter(self.order)) != wanted:
            raise ValueError(f"order names {dict(named)} blocks by block type; the block types have {wanted}")
