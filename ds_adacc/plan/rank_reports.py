"""What each rank asks and tells when all plan together, and how these are merged."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from ds_adacc import planner
from ds_adacc.plan.correction import Correction
from ds_adacc.plan.live_sets import Alive, LiveSet, Orders
from ds_adacc.plan.merged_graph import merged_graph
from ds_adacc.plan.repeated_collectives import Repeatable
from ds_adacc.planner import units


@dataclass(frozen=True)
class RankRequest:
    """What one rank asks for, or all of them.

    `live_sets`: what to plan for. `grown`: the block types of which more calls were alive at once than were planned
    for. `reindexed`: those in which a block's index has changed. `reason`: for the log; "" if the rank has none.
    """

    live_sets: frozenset[LiveSet]
    grown: frozenset[str]
    reindexed: frozenset[str]
    reason: str


@dataclass(frozen=True)
class RankAnswer:
    """What one rank tells of the block types in question: its reports on those that it has run, by digest.

    `passes`: those that it has run of these. `orders` is as in `ForwardOrder`. `available`: bytes left on its device;
    None if it has run no block yet. `repeatable`: the blocks whose collectives it can call again.
    """

    reports: Mapping[str, RankReport]
    passes: Sequence[Alive]
    orders: Orders
    available: int | None
    repeatable: Repeatable


@dataclass(frozen=True)
class RankReport:
    """The report of one rank on a block type.

    `count` is the number of calls alive at once, and `calls_per_block` the number of these for each block. `capacity`
    is the number of outlier channels, by value index. `correction` is None if the rank has no new measurement.
    `shares_inputs`: whether the rank can hold shares of block inputs; not while it has to measure gradient errors.
    """

    profile: planner.Profile
    count: int
    calls_per_block: int
    capacity: Mapping[int, int]
    correction: Correction | None = None
    shares_inputs: bool = True


def merge_requests(requests: Sequence[RankRequest]) -> RankRequest:
    """All that any rank asks for, and the first reason."""
    return RankRequest(
        frozenset().union(*(request.live_sets for request in requests)),
        frozenset().union(*(request.grown for request in requests)),
        frozenset().union(*(request.reindexed for request in requests)),
        next((request.reason for request in requests if request.reason), ""),
    )


def merge_capacity(counts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """The most outlier channels that any of the counts has, by value index."""
    capacity: dict[int, int] = {}
    for each in counts:
        for index, channels in each.items():
            capacity[index] = max(channels, capacity.get(index, 0))
    return capacity


def merge_corrections(reports: Sequence[RankReport], agreed: Correction) -> Correction:
    """The largest correction that any rank has measured. If no rank has one, the correction `agreed` before."""
    found = [report.correction for report in reports if report.correction is not None]
    return functools.reduce(Correction.larger, found) if found else agreed


def merge_profiles(reports: Sequence[RankReport]) -> planner.Profile:
    """One profile from those of all ranks.

    Seconds and codec errors are means; overlap seconds are the smallest. The graph is as of `merged_graph`. Codec bytes
    and workspaces, gradient errors and noise are the largest. Only codecs that all ranks offer are kept.
    """
    profiles = [report.profile for report in reports]
    graph = merged_graph([profile.graph for profile in profiles])
    seconds = tuple(fmean(times) for times in zip(*(p.op_seconds for p in profiles), strict=True))
    by = {units.Bytes: max, units.Seconds: fmean, units.Error: fmean, units.GradientError: max, units.Guarantee: all}
    codecs = tuple(planner.combined_offers(offers, by) for offers in zip(*(p.codecs for p in profiles), strict=True))
    overlap = tuple(min(seconds) for seconds in zip(*(p.overlap_seconds for p in profiles), strict=True))
    stale = tuple(map(max, zip(*(p.stale_errors for p in profiles), strict=True)))
    return planner.Profile(graph, seconds, codecs, overlap, max(p.noise for p in profiles), stale)


def merge_block_type(name: str, profile: planner.Profile, reports: Sequence[RankReport]) -> planner.BlockType:
    """The block type with the largest count of any rank.

    Each block gets its own policy if there are equally many on every rank; else all share one.
    """
    count = max(report.count for report in reports)
    shares = {divmod(report.count, report.calls_per_block) for report in reports}
    blocks = next(iter(shares))[0] if len(shares) == 1 else 1
    is_even = blocks > 0 and count % blocks == 0 and not any(rest for _, rest in shares)
    return planner.BlockType(name, profile, count, count // blocks if is_even else count)


def merge_orders(everyone: Sequence[Orders]) -> dict[LiveSet, tuple[str, ...]]:
    """The orders of the live sets for which all ranks that report an order report the same one."""
    sets = {names for orders in everyone for names in orders}
    known = {names: {orders[names] for orders in everyone if names in orders} for names in sets}
    return {names: found.pop() for names, found in known.items() if len(found) == 1}
