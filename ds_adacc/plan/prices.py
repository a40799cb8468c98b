"""What calls of the block types that this rank has run take together, in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ds_adacc import planner
from ds_adacc.plan.agreement import Agreement
from ds_adacc.plan.block_type import AgreedType
from ds_adacc.plan.live_sets import Alive, LiveSet
from ds_adacc.plan.plan import PlanRequest


class Prices:
    """Prices calls under the policies in force of an `Agreement`, and without checkpointing."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement

    def without(self, alive: Alive) -> int:
        """Peak bytes without checkpointing, if so many calls of each block type are alive."""
        types = {name: self._agreement.known_types[name] for name in sorted(alive)}
        specs = [
            planner.BlockType(name, self._agreement.profile_of(known), known.count, known.calls_per_block)
            if known.agreed is None
            else known.agreed.spec
            for name, known in types.items()
        ]
        return self._request(specs, alive).peak_without()

    def largest_pass(self, live_set: LiveSet) -> Alive:
        """The pass of just these block types that takes the most; if none is known, the most calls of each."""
        passes = self._agreement.passes.of(live_set)
        return max(passes, key=self.without, default=self._agreement.alive(live_set))

    def peak(self, agreed: Iterable[AgreedType], alive: Alive | None = None) -> int:
        """Predicted peak bytes of the calls of these block types together. `alive`: None if those planned for are."""
        agreed = [each if alive is None else each.of_calls(alive[each.spec.name]) for each in agreed]
        request, own = self._request([each.spec for each in agreed]), {each.spec.name: each.policies for each in agreed}
        problem = request.problem(request.block_types)
        policies = {self._agreement.origin(name): chosen for name, chosen in own.items()} | own
        return planner.peak_bytes(problem, [policies[each.name] for each in problem.block_types])

    def held(self, calls: Mapping[tuple[str, planner.Policy], int]) -> int:
        """Bytes that `calls` hold: the number of calls by block type and by the policy that they ran."""
        total = 0
        for (digest, policy), count in calls.items():
            known = self._agreement.known_types[digest]
            profile = self._agreement.profile_of(known) if known.agreed is None else known.agreed.spec.profile
            total += count * policy.held_bytes(profile)
        return total

    def is_planned(self, alive: Alive) -> bool:
        """Whether these block types were planned together, or together fit the budget under their current policies."""
        agreement, names = self._agreement, frozenset(alive)
        agreed = [agreement.known_types[name].agreed for name in alive]
        if None in agreed:
            return False
        # An adopted type was priced in the live sets of its origin, beside what was planned there. Not beside another
        # size of the same program, nor beside others that have adopted: each may have used what was left of the budget.
        origins, planned = frozenset(map(agreement.origin, names)), (*agreement.live_sets, *agreement.unfit)
        is_known = len(origins) == len(names) and any(origins <= known for known in planned)
        is_known = is_known and agreement.unpriced.isdisjoint(names) and len(names & agreement.origins.keys()) <= 1
        if is_known and all(alive[each.spec.name] <= each.spec.count for each in agreed):
            return True
        return agreement.budget.limit is not None and self.peak(agreed, alive) <= agreement.budget.limit

    def _request(self, specs: Sequence[planner.BlockType], alive: Alive | None = None) -> PlanRequest:
        """What the planner is asked about these block types together. `alive`: the calls of the one pass that they had.

        Backward is thought to take them in the order of the sizes that were planned for, if that is known. Each then
        has the name of the size from which it has adopted.
        """
        names = {spec.name: self._agreement.origin(spec.name) for spec in specs}
        orders = self._agreement.forward_order.orders
        if len(set(names.values())) < len(names):
            names, orders = {name: name for name in names}, {}  # two sizes of one program have no order
        types = {names[spec.name]: replace(spec, name=names[spec.name]) for spec in specs}
        passes = () if alive is None else ({names[name]: calls for name, calls in alive.items()},)
        return PlanRequest(types, [frozenset(types)], orders, passes=passes)
