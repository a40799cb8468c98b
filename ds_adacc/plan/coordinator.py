"""The kinds of blocks met so far and the policies chosen for them, the same on every rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ds_adacc import planner
from ds_adacc.config import AdaccConfig
from ds_adacc.execute.bound_policy import rows
from ds_adacc.execute.input_placement import InputPlacement
from ds_adacc.kernels import separates_outliers
from ds_adacc.log import get_logger
from ds_adacc.plan.block_type import Kind
from ds_adacc.plan.budget import available_bytes, budget_bytes
from ds_adacc.plan.consensus import Row, Terms, merge_kind, merge_orders, merge_profiles, merge_terms
from ds_adacc.plan.plan import (
    Decision,
    Orders,
    Policies,
    Scene,
    Together,
    compare,
    components,
    decide,
    largest,
    most_without,
    peak_when,
)
from ds_adacc.plan.ranks import Ranks
from ds_adacc.profile.measure import CodecMaker
from ds_adacc.record.recording import Recording
from ds_adacc.rectify.observer import Pass

_UNLIMITED = 1 << 62
_REMEMBERED = 256  # kinds whose policies stand for when they come back


@dataclass(frozen=True)
class Agreed:
    """What the ranks have agreed on for a kind of block."""

    kind: planner.Kind
    policies: Policies
    terms: Terms


@dataclass(frozen=True)
class PortfolioState:
    """The fields of a `Portfolio` that outlive the process; `limit` is in bytes."""

    limit: int | None = None
    together: tuple[Together, ...] = ()
    unfit: tuple[Together, ...] = ()
    orders: tuple[tuple[Together, tuple[str, ...]], ...] = ()
    agreed: tuple[Agreed, ...] = ()

    def check(self) -> None:
        """Raise ValueError unless every policy can be carried out."""
        for agreed in self.agreed:
            for policy in set(agreed.policies):
                policy.check(agreed.kind.profile)


class Portfolio:
    """Decides policies together with the other ranks.

    Ranks meet only in `decide`, which all of them call in the same step; the first solves for what any of them has
    measured. A policy for a kind that this rank has yet to meet is kept for when it does. `inputs` is how block inputs
    that a policy retains are held, the same on all ranks.
    """

    def __init__(self, config: AdaccConfig, codecs: CodecMaker, ranks: Ranks) -> None:
        self.kinds: dict[str, Kind] = {}
        self.inputs = InputPlacement()
        self._config = config
        self._codecs = codecs
        self._ranks = ranks
        self._limit: int | None = None
        self._together: tuple[Together, ...] = ()
        self._unfit: tuple[Together, ...] = ()
        self._orders: Orders = {}
        self._agreed: dict[str, Agreed] = {}

    def state(self) -> PortfolioState:
        """What has been agreed on."""
        orders, agreed = tuple(self._orders.items()), tuple(self._agreed.values())
        return PortfolioState(self._limit, self._together, self._unfit, orders, agreed)

    def restore(self, state: PortfolioState) -> None:
        """Put in force what had been agreed on then, and forget all kinds: they come back with their blocks."""
        self.kinds = {}
        self._limit, self._together, self._unfit = state.limit, state.together, state.unfit
        self._orders = dict(state.orders)
        self._agreed = {agreed.kind.name: agreed for agreed in state.agreed}

    def add(self, digest: str, recording: Recording, profile: planner.Profile) -> Kind:
        """A new kind, with the policies that were agreed on other ranks' word if there are any."""
        kind = self.kinds[digest] = Kind(recording, profile)
        if digest in self._agreed:
            agreed = self._agreed[digest]
            kind.agreed, kind.policies = agreed.kind, agreed.policies
            kind.capacity, kind.correction = agreed.terms.capacity, agreed.terms.correction
            kind.count, kind.calls_per_block = kind.agreed.count, kind.agreed.calls_per_block
        return kind

    def arrange(self, seen: Pass) -> None:
        """Learn from one forward and backward in what order the blocks run, and give each its place."""
        kinds = frozenset(kind for kind, _ in seen.calls) & self.kinds.keys()
        self._orders = {**self._orders, frozenset(kinds): seen.order}
        for digest in kinds:
            self.kinds[digest].calls_per_block = seen.calls_per_block(digest)
            for place, block in enumerate(seen.blocks(digest)):
                for record in block.records():
                    if record.kind == digest:
                        record.place = place

    def keep(self, digests: Collection[str]) -> None:
        """Forget the kinds of all other blocks; a policy once agreed still stands for when they come back."""
        self.kinds = {digest: kind for digest, kind in self.kinds.items() if digest in digests}

    @property
    def undecided(self) -> tuple[str, ...]:
        return tuple(digest for digest, kind in self.kinds.items() if kind.policies is None)

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
        told = self._ranks.gather((rows_of_kinds, self._orders, available))
        everyone, orders, free = zip(*told, strict=True)
        present = frozenset(digest for given in everyone for digest in given)
        sets = largest(names & present for names in known)
        self._orders = merge_orders(orders)
        room = min(nbytes for nbytes in free if nbytes is not None)
        decision, terms = self._ranks.on_first(lambda: self._attempt(everyone, sets, room, reason, must_fit))
        for group in decision.groups:
            if group.solution.out_of_time:
                limit = self._config.solver.max_seconds
                text = "adacc.solver.max_seconds = %s: no plan was found in that time; a greedy one is in force"
                get_logger().warning(text, limit)
            if group.shortfall:
                text = "nothing fits; what had no policy yet is recomputed if possible, with a planned peak of %s: %s"
                get_logger().warning(text, planner.human_bytes(group.solution.peak), group.shortfall)
        self._limit = decision.budget if self._limit is None else self._limit
        self._put_in_force(decision, terms)
        self._remember((*(names for names in known if not names & touched), *sets), decision)
        return decision

    def _remember(self, together: Iterable[Together], decision: Decision) -> None:
        """Keep the sets to be planned for from now on: not those that nothing fits, which would spoil the others."""
        unfit = {names for group in decision.groups if group.shortfall for names in group.unfit(decision.budget)}
        live = frozenset(self._agreed)
        self._unfit = largest(names for names in (*self._unfit, *unfit) if names <= live)
        self._together = largest(names & live for names in set(together) - unfit)

    def _put_in_force(self, decision: Decision, terms: Mapping[str, Terms]) -> None:
        policies = decision.policies
        for kind in decision.kinds:
            chosen, term = policies[kind.name], terms[kind.name]
            self._agreed.pop(kind.name, None)
            self._agreed[kind.name] = Agreed(kind, chosen, term)
            if kind.name in self.kinds:
                known = self.kinds[kind.name]
                known.agreed, known.policies = kind, chosen
                known.capacity, known.correction = term.capacity, term.correction
        for oldest in list(self._agreed)[:-_REMEMBERED]:
            del self._agreed[oldest]
        self._orders = {names: order for names, order in self._orders.items() if names <= self._agreed.keys()}

    def is_planned(self, names: Together) -> bool:
        """Whether these kinds have been planned for together, or keep the budget together as it is."""
        kinds = [self.kinds[name] for name in names]
        if any(kind.policies is None for kind in kinds):
            return False
        if any(names <= known for known in (*self._together, *self._unfit)):
            return True
        problem = planner.Problem(tuple(kind.agreed for kind in kinds))
        peak = planner.peak_bytes(problem, [kind.policies for kind in kinds])
        return self._limit is not None and peak <= self._limit

    def partners(self, digests: Sequence[str]) -> list[Together]:
        """The sets that these kinds hang together with, on every rank the same; none for a kind that nothing fits."""
        lost = frozenset().union(*self._unfit) - frozenset().union(*self._together)
        digests = [digest for digest in digests if digest not in lost]
        sets = (*self._together, *(frozenset((digest,)) for digest in digests))
        reached = [names for names in components(sets) if not names.isdisjoint(digests)]
        return [names for names in largest(sets) if any(names <= component for component in reached)]

    def held_bytes(self, calls: Mapping[tuple[str, int | None], int]) -> int:
        """Bytes that so many calls of the block at each place of a kind hold by the policies in force."""
        return sum(count * self.kinds[digest].held_bytes(place) for (digest, place), count in calls.items())

    def outlier_bytes(self, name: str, kind: Kind, index: int, capacity: int) -> int:
        """Bytes of an outlier codec's payload for a value when so many channels are kept raw."""
        value = kind.recording.values[index]
        codec = self._codecs.make(name, torch.device("cpu"), torch.zeros(capacity, dtype=torch.long))
        return codec.payload_bytes(torch.Size(rows(value)), value.geometry.dtype)

    def _row(self, digest: str) -> Row:
        kind = self.kinds[digest]
        return Row(self._counted(kind).to_json(), kind.count, kind.calls_per_block, kind.capacity, kind.correction)

    def _counted(self, kind: Kind) -> planner.Profile:
        return self.inputs.counted(kind.profile, kind.recording)

    def _recomputed(self, together: Iterable[Together]) -> int:
        """Predicted peak bytes of this rank's blocks when all that can be is recomputed."""
        own = {digest: planner.Kind(digest, self._counted(kind), kind.count) for digest, kind in self.kinds.items()}
        sets = [tuple(own[name] for name in sorted(names & own.keys())) for names in together]
        return max((peak_when(planner.recompute_policy, planner.Problem(kinds)) for kinds in sets if kinds), default=0)

    def _attempt(
        self,
        everyone: Sequence[Mapping[str, Row]],
        together: Sequence[Together],
        available: int,
        reason: str,
        must_fit: bool,
    ) -> tuple[Decision, dict[str, Terms]]:
        """The decision, and the terms agreed."""
        kinds, terms = self._merge(everyone)
        scene = Scene(kinds, together, self._orders, self._config.max_gradient_error)
        without = most_without(scene)
        budget = self._budget(without, available)
        forgiven: tuple[type[Exception], ...] = (planner.InfeasibleBudget, planner.NoSolutionInTime)
        if must_fit:
            forgiven = (planner.NoSolutionInTime,) if self._limit is None else ()
        settled = {digest: agreed.policies for digest, agreed in self._agreed.items()}
        groups = decide(scene, budget, self._config, settled, forgiven)
        return Decision(groups, budget, without, reason, compare(groups, budget)), terms

    def _budget(self, without: int, available: int) -> int:
        if self._config.forces_compression and self._config.memory_budget.kind == "auto":
            return _UNLIMITED
        return self._limit if self._limit is not None else budget_bytes(self._config.memory_budget, without, available)

    def _merge(self, everyone: Sequence[Mapping[str, Row]]) -> tuple[dict[str, planner.Kind], dict[str, Terms]]:
        """The ranks' kinds as the planner sees them, and the terms, by digest."""
        kinds, terms = {}, {}
        for digest in sorted({digest for known in everyone for digest in known}):
            given = [known[digest] for known in everyone if digest in known]
            terms[digest] = merge_terms(given)
            profile = self._resize(digest, merge_profiles(given), terms[digest].capacity)
            kinds[digest] = merge_kind(digest, terms[digest].correction.of(profile), given)
        return kinds, terms

    def _resize(self, digest: str, profile: planner.Profile, capacity: Mapping[int, int]) -> planner.Profile:
        """The profile with the outlier codecs' payloads at the capacities agreed."""
        if digest not in self.kinds:
            return profile
        kind = self.kinds[digest]
        codecs = list(profile.codecs)
        for index, channels in capacity.items():
            names = [cost.codec for cost in codecs[index] if separates_outliers(cost.codec)]
            sizes = {name: self.outlier_bytes(name, kind, index, channels) for name in names}
            codecs[index] = tuple(replace(cost, nbytes=sizes.get(cost.codec, cost.nbytes)) for cost in codecs[index])
        return replace(profile, codecs=tuple(codecs))
