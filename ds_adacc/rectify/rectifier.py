"""Adaptive policy evolution (section 3.4): compare the outliers of a tracking step with those planned for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ds_adacc.config import RectifierConfig
from ds_adacc.execute.block import Record
from ds_adacc.plan.block_type import KnownType
from ds_adacc.plan.coordinator import Coordinator
from ds_adacc.plan.ranks import Ranks

Counts = Mapping[str, Mapping[int, int]]  # outlier channels by block type and value


@dataclass(frozen=True)
class Verdict:
    """What the first rank finds for all of them: outlier channels as they are now, block types to re-plan, and why."""

    capacity: Counts
    drifted: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Review:
    """What came of a tracking step: whether a plan was made anew, and how many values of all blocks it changed."""

    replanned: bool = False
    changed: int = 0


class Rectifier:
    """Judges, and changes nothing: what follows from a verdict is the step controller's to do."""

    def __init__(self, config: RectifierConfig, ranks: Ranks) -> None:
        self.config = config
        self._ranks = ranks

    def judge(self, records: Iterable[Record], coordinator: Coordinator) -> Verdict:
        """The verdict on the outliers that a tracking step has left in the records. Every rank must call."""
        counts = self._count(records, coordinator.block_types)
        merged = _most(self._ranks.gather(counts))
        return self._ranks.on_first(lambda: self._compare(merged, coordinator))

    def _count(self, records: Iterable[Record], block_types: Mapping[str, KnownType]) -> dict[str, dict[int, int]]:
        """Outlier channels on this rank: the most of any block of the type. Waits for the device."""
        counts: dict[str, dict[int, int]] = {}
        for record in records:
            values = block_types[record.block_type].recording.values
            most = counts.setdefault(record.block_type, {})
            for index, (_, count) in record.outliers.items():
                if values[index].role in self.config.roles:
                    most[index] = max(most.get(index, 0), int(count))
        return counts

    def _compare(self, counts: Counts, coordinator: Coordinator) -> Verdict:
        """By how much compression rates (CRate, Table 2) differ from those planned."""
        drifted, worst, reason = [], self.config.drift, ""
        for digest, found in counts.items():
            known = coordinator.block_types.get(digest)
            if known is None or known.agreed is None:
                continue
            for index, count in found.items():
                value, codec = known.recording.values[index], known.outlier_codec(index)
                before, now = (
                    coordinator.outlier_bytes(codec, known, index, channels) / value.nbytes
                    for channels in (known.capacity.get(index, 0), count)
                )
                drift = abs(now - before) / before
                if drift > self.config.drift and digest not in drifted:
                    drifted.append(digest)
                if drift > worst:
                    worst = drift
                    reason = f"compression rate of {value.label} ({value.role}) {before:.3f} -> {now:.3f}"
        return Verdict(counts, tuple(drifted), reason)


def _most(everyone: Sequence[Counts]) -> Counts:
    """By block type and value, the most channels that any rank tells."""
    merged: dict[str, dict[int, int]] = {}
    for counts in everyone:
        for digest, found in counts.items():
            most = merged.setdefault(digest, {})
            for index, count in found.items():
                most[index] = max(most.get(index, 0), count)
    return merged
