"""What is to be planned: kinds of blocks, which of them are alive together, and in what order."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import groupby

from ds_adacc.planner.profile import Kind


@dataclass(frozen=True)
class Problem:
    """Kinds of blocks that share one budget.

    `together` are the sets of kinds, by name, whose calls are alive at once: each has the whole budget, and a kind in
    several has the same policies in all; none given: all are. `order` names the kind of every block in forward order,
    if backward is known to take the blocks in reverse; none given: it may take them in any. `max_gradient_error` bounds
    the estimated relative error of each block's gradient, the root of the sum of squares over what is compressed.

    Raises ValueError, naming the culprit, for kinds, sets or an order that do not fit together.
    """

    kinds: tuple[Kind, ...]
    together: tuple[frozenset[str], ...] = ()
    order: tuple[str, ...] = ()
    max_gradient_error: float | None = None

    def __post_init__(self) -> None:
        names = [kind.name for kind in self.kinds]
        if not names:
            raise ValueError("kinds is empty; give at least one kind of block")
        if len(set(names)) < len(names):
            raise ValueError(f"kinds are named {names}; give each a name of its own")
        self._check_together(set(names))
        if self.order:
            self._check_order()
        bound = self.max_gradient_error
        if bound is not None and not (math.isfinite(bound) and bound >= 0):
            raise ValueError(f"max_gradient_error is {bound!r}; it must be finite and non-negative")

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The sets alive together, as indices into `kinds`."""
        if not self.together:
            return (tuple(range(len(self.kinds))),)
        places = {kind.name: place for place, kind in enumerate(self.kinds)}
        return tuple(tuple(sorted(places[name] for name in names)) for names in self.together)

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """The order as (index into `kinds`, number of blocks in a row)."""
        places = {kind.name: place for place, kind in enumerate(self.kinds)}
        return tuple((places[name], len(list(row))) for name, row in groupby(self.order))

    def _check_together(self, names: set[str]) -> None:
        if not self.together:
            return
        if not all(self.together):
            raise ValueError("together has an empty set; name kinds in each")
        named = frozenset().union(*self.together)
        if unknown := sorted(named - names):
            raise ValueError(f"together names {unknown[0]!r}; the kinds are {sorted(names)}")
        if missing := sorted(names - named):
            raise ValueError(f"together has no set with kind {missing[0]!r}; name each kind in one, or in several")

    def _check_order(self) -> None:
        if len(self.groups) > 1:
            raise ValueError("order is given, and several sets are alive together; give an order to one set only")
        wanted = {kind.name: kind.blocks for kind in self.kinds}
        if shared := [kind.name for kind in self.kinds if kind.calls_per_block > 1]:
            raise ValueError(f"order is given, but each block of kind {shared[0]!r} is called more than once")
        if (named := Counter(self.order)) != wanted:
            raise ValueError(f"order names {dict(named)} blocks by kind; the kinds have {wanted}")
