"""Adaptive policy evolution (section 3.4): compare the outliers of a tracking step with those in the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_adacc.execute.block import Block
from ds_adacc.execute.block_registry import BlockRegistry
from ds_adacc.execute.variant import Variant
from ds_adacc.plan.agreement import Agreement
from ds_adacc.plan.rank_reports import merge_capacity
from ds_adacc.plan.ranks import Ranks

Counts = Mapping[str, Mapping[int, int]]  # number of outlier channels, by block type and value

# A fall of the compression rate counts so many times less than a rise: the plan stays right, and takes some bytes more.
# If both counted alike, a number of channels that goes up and down by one would bring a new plan each time.
_FALL = 2.0


@dataclass(frozen=True)
class Verdict:
    """The first rank's verdict for all ranks.

    `capacity` is the current number of outlier channels, `drifted` the block types to plan again, `reason` the cause.
    """

    capacity: Counts
    drifted: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Review:
    """The result of a tracking step: whether a new plan was made, and how many values of all blocks it changed."""

    replanned: bool = False
    changed: int = 0


def judge(blocks: BlockRegistry, agreement: Agreement, ranks: Ranks) -> Verdict:
    """The verdict on the outliers that a tracking step has stored in the blocks' variants. Changes nothing.

    Every rank must call. The step controller acts on the verdict.
    """
    merged = _most(ranks.gather(_count(blocks, agreement)))
    return ranks.on_first(lambda: _compare(merged, agreement))


def _count(blocks: BlockRegistry, agreement: Agreement) -> dict[str, dict[int, int]]:
    """The most outlier channels of any block on this rank, by block type and value. Waits for the device.

    They are channels of the program, so a call at an adopted size counts as one of the type that was planned: that type
    is known on all ranks, and no rank knows which sizes another one has adopted. Of each block the size that it ran
    last counts. The others may have been looked at long ago.
    """
    last: dict[tuple[Block, str], Variant] = {}
    for block, variant in blocks.variants():
        last.setdefault((block, agreement.origin(variant.digest)), variant)
    counts: dict[str, dict[int, int]] = {}
    for (_, digest), variant in last.items():
        values = agreement.known_types[variant.digest].recording.values
        most = counts.setdefault(digest, {})
        for index, (_, count) in variant.outliers.items():
            if values[index].role in agreement.config.rectifier.roles:
                most[index] = max(most.get(index, 0), int(count))
    return counts


def _compare(counts: Counts, agreement: Agreement) -> Verdict:
    """Compare the compression rates (CRate, Table 2) with those in the plan."""
    if not any(known.adds_time for known in agreement.known_types.values()):
        return Verdict(counts, (), "")  # no plan is faster than one that retains everything
    drifts = [each for each in _drifts(counts, agreement) if each.amount > agreement.config.rectifier.drift]
    largest = max(drifts, key=lambda each: each.amount, default=None)
    drifted = dict.fromkeys(each.digest for each in drifts)
    return Verdict(counts, tuple(drifted), largest.reason if largest is not None else "")


class _Drift(NamedTuple):
    """By how much the outliers of a value of a block type have changed, as a part of what the plan counts on."""

    digest: str
    amount: float
    reason: str


def _drifts(counts: Counts, agreement: Agreement) -> Iterator[_Drift]:
    for digest, found in counts.items():
        known = agreement.known_types.get(digest)
        if known is None or known.plan is None:
            continue
        for index, count in found.items():
            value, codec = known.recording.values[index], known.outlier_codec(index)
            before, now = (
                agreement.outlier_prices.payload_bytes(codec, known, index, channels) / value.nbytes
                for channels in (known.capacity.get(index, 0), count)
            )
            if now <= before:
                amount = (before - now) / before / _FALL
            else:  # a codec that the plan does not use is now even less worth it
                amount = (now - before) / before if known.holds_outliers(index) else 0.0
            yield _Drift(
                digest,
                amount,
                f"the outliers of {value.label} ({value.role}) in {known.recording.name} have changed: it compresses "
                f"to {now:.3f} of its bytes, where the plan counts on {before:.3f}",
            )


def _most(everyone: Sequence[Counts]) -> Counts:
    """The most outlier channels that any rank reports, by block type and value."""
    digests = dict.fromkeys(digest for counts in everyone for digest in counts)
    return {digest: merge_capacity(counts.get(digest, {}) for counts in everyone) for digest in digests}
