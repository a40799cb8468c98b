"""What the ranks have measured and seen of a block type, merged into one."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ds_adacc import planner
from ds_adacc.plan.correction import Correction
from ds_adacc.plan.plan import LiveSet, Orders


@dataclass(frozen=True)
class RankReport:
    """What one rank tells of a block type: its profile, calls alive at once, how many of these are of each block.

    `correction` is None on a rank that has measured nothing new of it.
    """

    profile: planner.Profile
    count: int
    calls_per_block: int
    capacity: Mapping[int, int]
    correction: Correction | None = None


def merge_capacity(reports: Sequence[RankReport]) -> dict[int, int]:
    """By value, the most outlier channels that any rank tells."""
    capacity: dict[int, int] = {}
    for report in reports:
        for index, channels in report.capacity.items():
            capacity[index] = max(channels, capacity.get(index, 0))
    return capacity


def merge_corrections(reports: Sequence[RankReport], agreed: Correction) -> Correction:
    """The largest that any rank has measured; what was `agreed` before if none has."""
    found = [report.correction for report in reports if report.correction is not None]
    return functools.reduce(Correction.larger, found) if found else agreed


def merge_profiles(reports: Sequence[RankReport]) -> planner.Profile:
    """Mean times; of what differs from rank to rank, the larger."""
    profiles = [report.profile for report in reports]
    largest = max(profiles, key=lambda profile: sum(value.nbytes for value in profile.graph.values))
    seconds = tuple(statistics.fmean(times) for times in zip(*(p.op_seconds for p in profiles), strict=True))
    codecs = tuple(
        tuple(_mean_cost(costs) for costs in _shared(offers))
        for offers in zip(*(p.codecs for p in profiles), strict=True)
    )
    overlap = tuple(min(seconds) for seconds in zip(*(p.overlap_seconds for p in profiles), strict=True))
    return planner.Profile(largest.graph, seconds, codecs, overlap, max(p.noise for p in profiles))


def merge_block_type(name: str, profile: planner.Profile, reports: Sequence[RankReport]) -> planner.BlockType:
    """The most calls; a policy for each block, if the calls fall on the blocks alike on every rank."""
    count = max(report.count for report in reports)
    shares = {(report.count, report.calls_per_block) for report in reports}
    each = reports[0].calls_per_block if len(shares) == 1 and count % reports[0].calls_per_block == 0 else count
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
