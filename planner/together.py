"""Which kinds of blocks are alive together."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ds_adacc.planner.profile import Kind

Together = Sequence[Collection[str]] | None  # sets of the kinds' names; None: all are alive together


def groups_of(kinds: Sequence[Kind], together: Together) -> list[list[int]]:
    """The sets as indices into `kinds`. ValueError for a set that is empty or names no kind, or a kind in no set."""
    if together is None:
        return [list(range(len(kinds)))]
    places = {kind.name: place for place, kind in enumerate(kinds)}
    named = {name for names in together for name in names}
    if unknown := sorted(named - places.keys()):
        raise ValueError(f"together names {unknown[0]!r}; the kinds are {sorted(places)}")
    if missing := sorted(places.keys() - named):
        raise ValueError(f"together has no set with kind {missing[0]!r}; name each kind in one, or in several")
    if not all(together):
        raise ValueError("together has an empty set; name kinds in each")
    return [sorted(places[name] for name in names) for names in together]
