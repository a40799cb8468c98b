"""What the planner is asked: the block types of one live set, and in what order their blocks run."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import groupby

from ds_adacc.planner.profile import BlockType


@dataclass(frozen=True)
class Problem:
    """One live set: block types whose calls are alive at once and share one budget.

    `order` names the block type of every block in forward order. It is given if backward is known to take the blocks in
    reverse, and to free what they hold; without it, backward may take them in any order. `max_gradient_error` bounds
    the estimated relative error of each block's gradient, which is the root of the sum of squares over what is
    compressed.

    Raises ValueError, naming the culprit, for block types or an order that do not fit together.
    """

    block_types: tuple[BlockType, ...]
    order: tuple[str, ...] = ()
    max_gradient_error: float | None = None

    def __post_init__(self) -> None:
        names = [block_type.name for block_type in self.block_types]
        if not names:
            raise ValueError("block types is empty; give at least one block type")
        if len(set(names)) < len(names):
            raise ValueError(f"block types are named {names}; give each a name of its own")
        if self.order:
            self._check_order()
        bound = self.max_gradient_error
        if bound is not None and not (math.isfinite(bound) and bound >= 0):
            raise ValueError(f"max_gradient_error is {bound!r}; it must be finite and non-negative")

    @property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """The order as (index into `block_types`, number of blocks in a row)."""
        places = {block_type.name: place for place, block_type in enumerate(self.block_types)}
        return tuple((places[name], len(list(row))) for name, row in groupby(self.order))

    def _check_order(self) -> None:
        wanted = {block_type.name: block_type.blocks for block_type in self.block_types}
        if shared := [block_type.name for block_type in self.block_types if block_type.calls_per_block > 1]:
            raise ValueError(f"order is given, but each block of block type {shared[0]!r} is called more than once")
        if kept := [block_type.name for block_type in self.block_types if not block_type.profile.graph.frees_stored]:
            raise ValueError(f"order is given, but backward keeps what the blocks of block type {kept[0]!r} store")
        if (named := Counter(self.order)) != wanted:
            raise ValueError(f"order names {dict(named)} blocks by block type; the block types have {wanted}")
