"""What the ranks have measured and seen, as one."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ds_adacc import planner
from ds_adacc.plan.correction import Correction
from ds_adacc.plan.plan import LiveSet, Orders


@dataclass(frozen=True)
class Row:
    """What one rank tells of a block type: its profile, calls alive at once, of which so many of each block.

    `correction` is None on a rank that has measured nothing.
    """

    profile: planner.Profile
    count: int
    calls_per_block: int
    capacity: Mapping[int, int]
    correction: Correction | None = None


@dataclass(frozen=True)
class Terms:
    """What all ranks plan a block type with: outlier channels kept raw by value, and the correction of its profile."""

    capacity: dict[int, int]
    correction: Correction


def merge_terms(rows: Sequence[Row]) -> Terms:
    """The most that any rank tells."""
    capacity: dict[int, int] = {}
    for row in rows:
        for index, channels in row.capacity.items():
            capacity[index] = max(channels, capacity.get(index, 0))
    found = [row.correction for row in rows if row.correction is not None]
    return Terms(capacity, functools.reduce(Correction.larger, found) if found else Correction())


def merge_profiles(rows: Sequence[Row]) -> planner.Profile:
    """Mean times; of what differs from rank to rank, the larger."""
    profiles = [row.profile for row in rows]
    largest = max(profiles, key=lambda profile: sum(value.nbytes for value in profile.graph.values))
    seconds = tuple(statistics.fmean(times) for times in zip(*(p.op_seconds for p in profiles), strict=True))
    codecs = tuple(
        tuple(_mean_cost(costs) for costs in _shared(offers))
        for offers in zip(*(p.codecs for p in profiles), strict=True)
    )
    overlap = tuple(min(seconds) for seconds in zip(*(p.overlap_seconds for p in profiles), strict=True))
    return planner.Profile(largest.graph, seconds, codecs, overlap, max(p.noise for p in profiles))


def merge_block_type(name: str, profile: planner.Profile, rows: Sequence[Row]) -> planner.BlockType:
    """The most calls; a policy for each block, if they fall on the blocks alike on every rank."""
    count = max(row.count for row in rows)
    shares = {(row.count, row.calls_per_block) for row in rows}
    each = rows[0].calls_per_block if len(shares) == 1 and count % rows[0].calls_per_block == 0 else count
    return planner.BlockType(name, profile, count, each)


def merge_orders(everyone: Sequence[Orders]) -> dict[LiveSet, tuple[str, ...]]:
    """The orders on which all ranks that know one agree."""
    sets = {names for orders in everyone for names in orders}
    known = {names: {orders[names] for orders in everyone if names in orders} for names in sets}
    return {names: found.pop() for names, found in known.items() if len(found) == 1}


def _shared(offers: Sequence[Sequence[planner.CodecCost]]) -> list[list[planner.CodecCost]]:
    """The ranks' costs of each codec that all of them offer for a value."""
    by_name = [{cost.codec: cost for cost in costs} for costs in offers]
    return [[costs[name] for costs in by_name] for name in by_name[0] if all(name in costs for costs in by_name)]


def _mean_cost(costs: Sequence[planner.CodecCost]) -> planner.CodecCost:
    return replace(
        costs[0],
        nbytes=max(cost.nbytes for cost in costs),
        compress_seconds=statistics.fmean(cost.compress_seconds for cost in costs),
        decompress_seconds=statistics.fmean(cost.decompress_seconds for cost in costs),
        error=statistics.fmean(cost.error for cost in costs),
        gradient_error=max(cost.gradient_error for cost in costs),
    )
