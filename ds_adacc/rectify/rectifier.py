"""Adaptive policy evolution (section 3.4): look for drifting outliers at ever rarer steps, re-plan where they drift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from ds_adacc import planner
from ds_adacc.config import RectifierConfig
from ds_adacc.engine.checkpoint_file import RectifierState
from ds_adacc.log import get_logger
from ds_adacc.plan.block_type import BlockType
from ds_adacc.plan.plan import Policies
from ds_adacc.runtime.runtime import Runtime

Counts = Mapping[str, Mapping[int, int]]


@dataclass(frozen=True)
class Verdict:
    """The first rank's word for all: outlier channels to be kept raw, block types to re-plan, and why."""

    capacity: Counts
    drifted: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Review:
    """What came of a tracking step: whether plans were made anew, and how many values of all blocks changed in them."""

    replanned: bool = False
    changed: int = 0


class Rectifier:
    """Counts optimizer steps; at each tracking step's end compares the outliers with those planned for.

    The interval to the next tracking step doubles (1, 2, 4, … max_interval) and falls back to 1 after a change of
    policy. The first step under a plan is metered, so it is not one that looks. Every rank must call `end_step` in the
    same steps. `review` is that of the step that has just ended, None if it was no tracking step.
    """

    def __init__(self, config: RectifierConfig, runtime: Runtime) -> None:
        self._config = config
        self._runtime = runtime
        self._log = get_logger()
        self.steps = 0
        self.interval = 1
        self.review: Review | None = None
        self._next = 1

    def state(self) -> RectifierState:
        """What it has counted."""
        return RectifierState(self.steps, self.interval, self._next, self._runtime.tracking)

    def restore(self, state: RectifierState | None) -> None:
        """Count on from there; from the start, if None. To be called after the runtime's own."""
        state = state or RectifierState()
        self.steps, self.interval = state.steps, min(state.interval, self._config.max_interval)
        self._next = min(state.next, self.steps + self.interval)
        if state.tracking:
            self._runtime.begin_tracking()

    def end_step(self) -> None:
        """To be called at every optimizer step boundary once a plan is in force."""
        self.steps += 1
        self.review = None
        if self._runtime.tracking:
            self._runtime.end_tracking()
            self.review = self._review()
            self.interval = 1 if self.review.changed else min(2 * self.interval, self._config.max_interval)
            self._next = self.steps + self.interval
        if self.steps + 1 >= self._next and self._runtime.meters_after != self._runtime.steps:
            self._runtime.begin_tracking()

    def _review(self) -> Review:
        verdict = self._judge(self._count())
        if verdict.drifted:
            return self._replan(verdict)
        for digest in self._runtime.coordinator.block_types:
            self._runtime.rebind(digest)
        return Review()

    def _count(self) -> dict[str, dict[int, int]]:
        """Outlier channels by block type and value on this rank: the most of any block. Waits for the device."""
        counts: dict[str, dict[int, int]] = {}
        for record in self._runtime.blocks.records():
            recording = self._runtime.coordinator.block_types[record.block_type].recording
            most = counts.setdefault(record.block_type, {})
            for index, (_, count) in record.outliers.items():
                if recording.values[index].role in self._config.roles:
                    most[index] = max(most.get(index, 0), int(count))
        return counts

    def _judge(self, counts: Counts) -> Verdict:
        ranks = self._runtime.ranks
        merged = _most(ranks.gather(counts))
        return ranks.on_first(lambda: self._drift(merged))

    def _drift(self, counts: Counts) -> Verdict:
        drifted, worst, reason = [], self._config.drift, ""
        for digest, found in counts.items():
            block_type = self._runtime.coordinator.block_types.get(digest)
            if block_type is None or block_type.policies is None:
                continue
            for index, count in found.items():
                before, now = self._rates(block_type, index, count)
                drift = abs(now - before) / before
                if drift > self._config.drift and digest not in drifted:
                    drifted.append(digest)
                if drift > worst:
                    value = block_type.recording.values[index]
                    worst = drift
                    reason = f"compression rate of {value.name} ({value.role}) {before:.3f} -> {now:.3f}"
        return Verdict(counts, tuple(drifted), reason)

    def _rates(self, block_type: BlockType, index: int, count: int) -> tuple[float, float]:
        """The outlier codec's compressed size over the raw size (CRate, Table 2), as planned and as now."""
        coordinator, raw = self._runtime.coordinator, block_type.recording.values[index].nbytes
        name, capacity = block_type.outlier_codec(index), block_type.capacity.get(index, 0)
        planned, found = (
            coordinator.outlier_bytes(name, block_type, index, channels) for channels in (capacity, count)
        )
        return planned / raw, found / raw

    def _replan(self, verdict: Verdict) -> Review:
        coordinator = self._runtime.coordinator
        live_sets = coordinator.partners(verdict.drifted)
        if not live_sets:
            return self._stay(verdict, "nothing fits the budget")
        digests = sorted(coordinator.block_types.keys() & {digest for names in live_sets for digest in names})
        before = {digest: coordinator.block_types[digest].capacity for digest in digests}
        for digest in digests:
            coordinator.block_types[digest].capacity = {**before[digest], **verdict.capacity.get(digest, {})}
        old = {digest: coordinator.block_types[digest].policies for digest in digests}
        try:
            plan = self._runtime.decide(live_sets, f"step {self.steps}: {verdict.reason}")
        except (planner.InfeasibleBudget, planner.NoSolutionInTime) as error:
            for digest in digests:
                coordinator.block_types[digest].capacity = before[digest]
            return self._stay(verdict, error)
        changed = sum(_differences(old[d], plan.policies.get(d)) for d in digests)
        self._log.info("step %d: %s: re-planned, %d values changed", self.steps, verdict.reason, changed)
        return self._tell(verdict, Review(True, changed))

    def _stay(self, verdict: Verdict, why: object) -> Review:
        self._log.warning("step %d: %s, but the policy stays: %s", self.steps, verdict.reason, why)
        return self._tell(verdict, Review())

    def _tell(self, verdict: Verdict, review: Review) -> Review:
        self._runtime.journal.write("rectifier", step=self.steps, reason=verdict.reason, **asdict(review))
        return review


def _most(everyone: Sequence[Counts]) -> Counts:
    merged: dict[str, dict[int, int]] = {}
    for counts in everyone:
        for digest, found in counts.items():
            most = merged.setdefault(digest, {})
            for index, count in found.items():
                most[index] = max(most.get(index, 0), count)
    return merged


def _differences(old: Policies | None, new: Policies | None) -> int:
    """How many values of how many blocks are stored otherwise."""
    if old is None or new is None or len(old) != len(new):
        return sum(len(policy.stores) for policy in new or ())
    stores = (
        (a, b) for before, after in zip(old, new, strict=True) for a, b in zip(before.stores, after.stores, strict=True)
    )
    return sum(a != b for a, b in stores)
