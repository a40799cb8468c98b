"""The kinds of blocks met so far and the policies chosen for them, the same on every rank."""

from __future__ import annotations

import pickle
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ds_adacc import planner
from ds_adacc.budget import available_bytes, budget_bytes
from ds_adacc.config import AdaccConfig
from ds_adacc.decision import Decision, Together, components, decide, largest, most_without
from ds_adacc.log import get_logger
from ds_adacc.measure import CodecMaker
from ds_adacc.plan import rows
from ds_adacc.program import Recording
from ds_adacc.ranks import Ranks

_UNLIMITED = 1 << 62
_REMEMBERED = 256  # kinds whose policies stand for when they come back


@dataclass
class Kind:
    """Blocks with the same program, hence the same profile and policy.

    `count` is how many calls are alive at once; `capacity` the number of outlier channels kept raw for each value that
    the outlier codec may hold. `policy` is None until one has been agreed; `agreed` is what it was agreed for.
    """

    recording: Recording
    profile: planner.Profile
    count: int = 1
    capacity: dict[int, int] = field(default_factory=dict)
    policy: planner.Policy | None = None
    agreed: planner.Kind | None = None

    @property
    def held_bytes(self) -> int:
        """What one call holds between forward and backward by the policy in force; 0 before there is one."""
        return self.policy.held_bytes(self.agreed.profile) if self.policy and self.agreed else 0

    @property
    def outlier_values(self) -> list[int]:
        """Values that the outlier codec may hold."""
        offers = enumerate(self.profile.codecs)
        return [i for i, costs in offers if self._holds_outliers(i) or any(cost.codec == "outlier" for cost in costs)]

    def tracked_values(self, roles: Sequence[str]) -> list[int]:
        """Those of these roles, and those that the outlier codec does hold: its channels are to be kept fresh."""
        values = self.recording.values
        return [i for i in self.outlier_values if values[i].role in roles or self._holds_outliers(i)]

    def narrow(self, offers: Sequence[Sequence[str]]) -> None:
        """Offer, from the next planning on, only the codecs that this block too may use, by value."""
        kept = [
            tuple(c for c in costs if c.codec in names)
            for costs, names in zip(self.profile.codecs, offers, strict=True)
        ]
        self.profile = replace(self.profile, codecs=tuple(kept))

    def _holds_outliers(self, index: int) -> bool:
        return self.policy is not None and self.policy.stores[index] == "outlier"


class Portfolio:
    """Decides policies together with the other ranks.

    Ranks meet only in `decide`, which all of them call in the same step; the first solves for what any of them has
    measured. A policy for a kind that this rank has yet to meet is kept for when it does.
    """

    def __init__(self, config: AdaccConfig, codecs: CodecMaker, ranks: Ranks) -> None:
        self.kinds: dict[str, Kind] = {}
        self._config = config
        self._codecs = codecs
        self._ranks = ranks
        self._limit: int | None = None
        self._together: tuple[Together, ...] = ()
        self._unfit: tuple[Together, ...] = ()
        self._agreed: dict[str, tuple[planner.Kind, planner.Policy, dict[int, int]]] = {}

    def add(self, digest: str, recording: Recording, profile: planner.Profile) -> Kind:
        """A new kind, with the policy that was agreed on other ranks' word if there is one."""
        kind = self.kinds[digest] = Kind(recording, profile)
        if digest in self._agreed:
            kind.agreed, kind.policy, kind.capacity = self._agreed[digest]
            kind.count = kind.agreed.count
        return kind

    def keep(self, digests: Collection[str]) -> None:
        """Forget the kinds of all other blocks; a policy once agreed still stands for when they come back."""
        self.kinds = {digest: kind for digest, kind in self.kinds.items() if digest in digests}

    @property
    def undecided(self) -> tuple[str, ...]:
        return tuple(digest for digest, kind in self.kinds.items() if kind.policy is None)

    def decide(
        self, together: Collection[Together], device: torch.device | None, reason: str, must_fit: bool = True
    ) -> Decision:
        """Agree on policies for the kinds named, and those that hang together with them, and put them in force.

        Every rank must call, with what is `together` on it. A budget that is a fraction or "auto" is taken at the
        first decision, and stands from then on, in bytes. On a rank that has run no block yet `device` is None: others'
        memory decides. All raise what the first rank raises: planner.InfeasibleBudget, and from the second decision on
        planner.NoSolutionInTime, on every rank. With `must_fit` false neither is raised: policies in force then stay,
        and what has none is recomputed, with a warning.
        """
        new = {names for sets in self._ranks.gather(list(together)) for names in sets}
        known = largest((*self._together, *new))
        touched = {name for names in components(known) if any(names & s for s in new) for name in names}
        rows_of_kinds = {digest: self._row(digest) for digest in sorted(touched & self.kinds.keys())}
        available = None if device is None else available_bytes(device, self._recomputed(known))
        everyone = self._ranks.gather((rows_of_kinds, available))
        present = frozenset(digest for given, _ in everyone for digest in given)
        sets = largest(names & present for names in known)
        decision, capacities = on_first(self._ranks, lambda: self._attempt(everyone, sets, reason, must_fit))
        for group in decision.groups:
            if group.shortfall:
                text = "what has no policy that can stay is recomputed if possible, with a planned peak of %s: %s"
                get_logger().warning(text, planner.human_bytes(group.solution.peak), group.shortfall)
        self._limit = decision.budget if self._limit is None else self._limit
        self._put_in_force(decision, capacities)
        self._remember((*(names for names in known if not names & touched), *sets), decision)
        return decision

    def _remember(self, together: Iterable[Together], decision: Decision) -> None:
        """Keep the sets to be planned for from now on: not those that nothing fits, which would spoil the others."""
        unfit = {names for group in decision.groups if group.shortfall for names in group.unfit(decision.budget)}
        live = frozenset(self._agreed)
        self._unfit = largest(names for names in (*self._unfit, *unfit) if names <= live)
        self._together = largest(names & live for names in set(together) - unfit)

    def _put_in_force(self, decision: Decision, capacities: Mapping[str, dict[int, int]]) -> None:
        policies = decision.policies
        for kind in decision.kinds:
            policy, capacity = policies[kind.name], capacities[kind.name]
            self._agreed.pop(kind.name, None)
            self._agreed[kind.name] = kind, policy, capacity
            if kind.name in self.kinds:
                known = self.kinds[kind.name]
                known.agreed, known.policy, known.capacity, known.profile = kind, policy, capacity, kind.profile
        for oldest in list(self._agreed)[:-_REMEMBERED]:
            del self._agreed[oldest]

    def is_planned(self, names: Together) -> bool:
        """Whether these kinds have been planned for together, or keep the budget together as it is."""
        kinds = [self.kinds[name] for name in names]
        if any(kind.policy is None for kind in kinds):
            return False
        if any(names <= known for known in (*self._together, *self._unfit)):
            return True
        peak = planner.peak_bytes([kind.agreed for kind in kinds], [kind.policy for kind in kinds])
        return self._limit is not None and peak <= self._limit

    def partners(self, digests: Sequence[str]) -> list[Together]:
        """The sets that these kinds hang together with, on every rank the same; none for a kind that nothing fits."""
        lost = frozenset().union(*self._unfit) - frozenset().union(*self._together)
        digests = [digest for digest in digests if digest not in lost]
        sets = (*self._together, *(frozenset((digest,)) for digest in digests))
        reached = [names for names in components(sets) if not names.isdisjoint(digests)]
        return [names for names in largest(sets) if any(names <= component for component in reached)]

    def held_bytes(self, calls: Mapping[str, int]) -> int:
        """Bytes that so many calls of each kind hold by the policies in force."""
        return sum(count * self.kinds[digest].held_bytes for digest, count in calls.items())

    def outlier_bytes(self, kind: Kind, index: int, capacity: int) -> int:
        """Bytes of the outlier codec's payload for a value when so many channels are kept raw."""
        value = kind.recording.values[index]
        codec = self._codecs.make("outlier", torch.device("cpu"), torch.zeros(capacity, dtype=torch.long))
        return codec.payload_bytes(torch.Size(rows(value)), value.geometry.dtype)

    def _row(self, digest: str) -> tuple[dict[str, Any], int, dict[int, int]]:
        kind = self.kinds[digest]
        return kind.profile.to_json(), kind.count, kind.capacity

    def _recomputed(self, together: Iterable[Together]) -> int:
        """Predicted peak bytes of this rank's blocks when all that can be is recomputed."""
        own = {digest: planner.Kind(digest, kind.profile, kind.count) for digest, kind in self.kinds.items()}
        sets = [[own[name] for name in names if name in own] for names in together]
        return max((_recomputed_peak(kinds) for kinds in sets if kinds), default=0)

    def _attempt(
        self, everyone: Sequence[Any], together: Sequence[Together], reason: str, must_fit: bool
    ) -> tuple[Decision, dict[str, dict[int, int]]]:
        """The decision, and the capacities agreed."""
        kinds, capacities = self._merge([rows_of_kinds for rows_of_kinds, _ in everyone])
        without = most_without(kinds, together)
        budget = self._budget(without, min(free for _, free in everyone if free is not None))
        forgiven: tuple[type[Exception], ...] = (planner.InfeasibleBudget, planner.NoSolutionInTime)
        if must_fit:
            forgiven = (planner.NoSolutionInTime,) if self._limit is None else ()
        settled = {digest: policy for digest, (_, policy, _) in self._agreed.items()}
        groups = decide(kinds, together, budget, self._config, settled, forgiven)
        return Decision(groups, budget, without, reason), capacities

    def _budget(self, without: int, available: int) -> int:
        if self._config.forces_compression and self._config.memory_budget.kind == "auto":
            return _UNLIMITED
        return self._limit if self._limit is not None else budget_bytes(self._config.memory_budget, without, available)

    def _merge(
        self, everyone: Sequence[Mapping[str, Any]]
    ) -> tuple[dict[str, planner.Kind], dict[str, dict[int, int]]]:
        """The ranks' measurements as one: mean times, the largest counts and outlier capacities."""
        kinds, capacities = {}, {}
        for digest in sorted({digest for known in everyone for digest in known}):
            given = [known[digest] for known in everyone if digest in known]
            profiles = [planner.Profile.from_json(profile) for profile, _, _ in given]
            capacity: dict[int, int] = {}
            for _, _, wanted in given:
                for index, channels in wanted.items():
                    capacity[index] = max(channels, capacity.get(index, 0))
            profile = self._resize(digest, _mean(profiles), capacity)
            kinds[digest] = planner.Kind(digest, profile, max(count for _, count, _ in given))
            capacities[digest] = capacity
        return kinds, capacities

    def _resize(self, digest: str, profile: planner.Profile, capacity: Mapping[int, int]) -> planner.Profile:
        """The profile with the outlier codec's payloads at the capacities agreed."""
        if digest not in self.kinds:
            return profile
        kind = self.kinds[digest]
        codecs = list(profile.codecs)
        for index, channels in capacity.items():
            nbytes = self.outlier_bytes(kind, index, channels)
            codecs[index] = tuple(
                replace(cost, nbytes=nbytes) if cost.codec == "outlier" else cost for cost in codecs[index]
            )
        return replace(profile, codecs=tuple(codecs))


def _recomputed_peak(kinds: Sequence[planner.Kind]) -> int:
    return planner.peak_bytes(kinds, [planner.recompute_policy(kind.profile) for kind in kinds])


def on_first(ranks: Ranks, work: Callable[[], Any]) -> Any:
    """What `work` gives on the first rank; what it raises there, every rank raises. Every rank must call."""
    result, error = None, None
    if ranks.is_first:
        try:
            result = work()
        except Exception as raised:
            error = raised
    result, told = ranks.from_first((result, _portable(error)))
    if told is not None:
        raise error or told
    return result


def _portable(error: Exception | None) -> Exception | None:
    """The exception, or one of its text where it does not survive pickling."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"on the first rank: {type(error).__name__}: {error}")


def _mean(profiles: Sequence[planner.Profile]) -> planner.Profile:
    largest = max(profiles, key=lambda profile: sum(value.nbytes for value in profile.graph.values))
    seconds = tuple(statistics.fmean(times) for times in zip(*(p.op_seconds for p in profiles), strict=True))
    codecs = tuple(
        tuple(_mean_cost(costs) for costs in _shared(offers))
        for offers in zip(*(p.codecs for p in profiles), strict=True)
    )
    return planner.Profile(largest.graph, seconds, codecs)


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
    )
