"""Policies for a block type at new input sizes, from those of the same program at other sizes, without a solver.

The search is over few points: what the blocks run at the other sizes, with some blocks that retain everything where the
budget allows it, or some that run the leanest of these policies where it does not. If none of them fits, it is over
policies that all blocks share, without a codec that changes a value, as a greedy planner would choose them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ds_adacc import planner
from ds_adacc.plan.block_type import TypePlan
from ds_adacc.plan.live_sets import LiveSet, Orders, TypePolicies
from ds_adacc.plan.plan import PlanRequest

Permit = Callable[[int, planner.Policy], bool]  # of the block with this index


class PolicySearch:
    """Prices policies of the block type of `relative` as if its blocks had another profile.

    `plans`: of all block types, by name. `live_sets`: those without `relative` are left out. `permit`: whether a block
    may run a policy. `here`: what some of them run beside it now, at other sizes than those planned for. The policies
    are priced beside both.
    """

    def __init__(
        self,
        relative: TypePlan,
        profile: planner.Profile,
        plans: Mapping[str, TypePlan],
        live_sets: Sequence[LiveSet],
        orders: Orders,
        permit: Permit,
        here: Mapping[str, TypePlan] | None = None,
    ) -> None:
        name = relative.spec.name
        self.spec = replace(relative.spec, profile=profile)
        self._relative = relative
        live_sets = [names for names in live_sets if name in names] or [frozenset((name,))]
        names = frozenset().union(*live_sets) - {name}
        others = [{other: plans[other] for other in names}]
        if changed := {other: plan for other, plan in (here or {}).items() if other in names}:
            others.append({**others[0], **changed})
        self._permit = permit
        self._beside = [_Beside(self.spec, each, live_sets, orders) for each in others]

    def peak(self, policies: TypePolicies) -> int:
        """Predicted peak bytes of the live set that takes the most."""
        return max(each.peak(policies) for each in self._beside)

    @property
    def without(self) -> int:
        """Predicted peak bytes without checkpointing."""
        return max(each.without for each in self._beside)

    def policies(self, limit: int) -> TypePolicies | None:
        """Policies within so many bytes, the fewest seconds first; None if there are none among those tried."""
        retain, lean = planner.retain_policy(self.spec.profile), planner.recompute_policy(self.spec.profile)
        before = self.inherited()
        found = self._most(limit, lambda blocks: (retain,) * blocks + before[blocks:])
        if found is not None:
            return found
        # Of those that hold equally little, the one that moves the least to host memory, and of these the first: every
        # rank must find the same.
        leanest = min(dict.fromkeys((*before, lean)), key=self._held_and_moved)

        def leaner(kept: int) -> TypePolicies:
            changed = (leanest if self._permit(index, leanest) else lean for index in range(len(before) - kept))
            return (*changed, *before[len(before) - kept :])

        return self._most(limit, leaner) or self._shared(limit)

    def inherited(self) -> TypePolicies:
        """What the blocks run at the other sizes; where that is impossible here, they recompute all that they can."""
        lean = planner.recompute_policy(self.spec.profile)
        return tuple(
            found if (found := self._staying(policy)) is not None and self._permit(index, found) else lean
            for index, policy in enumerate(self._relative.policies)
        )

    def _staying(self, policy: planner.Policy) -> planner.Policy | None:
        """The policy, with what is too small here to be offloaded on its device; None if that is not on offer."""
        offers = ({offer.codec for offer in of_value} for of_value in self.spec.profile.offers)
        pairs = zip(policy.stores, offers, strict=True)
        stores = (store if store in on_offer else planner.on_device(store) for store, on_offer in pairs)
        found = planner.Policy(tuple(stores)).with_asked(self.spec.profile.graph)
        return found if found.is_on_offer(self.spec.profile) else None

    def _held_and_moved(self, policy: planner.Policy) -> tuple[int, int]:
        run = planner.simulate(self.spec.profile, policy)
        return run.held, run.fetched

    def plan(self, name: str, policies: TypePolicies) -> TypePlan:
        """The plan of the block type `name`, which has this profile, with these policies."""
        return replace(self._relative, spec=replace(self.spec, name=name), policies=policies)

    def _shared(self, limit: int) -> TypePolicies | None:
        spec = self._relative.spec
        # A lossy policy that no block has run yet would await its trial.
        codecs = tuple(tuple(cost for cost in costs if cost.lossless) for costs in spec.profile.codecs)
        # Ranked by the seconds that the ranks have agreed on, so that they choose alike.
        exact = planner.greedy_policies(replace(spec, profile=replace(spec.profile, codecs=codecs)))
        shared = ((policy,) * len(self._relative.policies) for policy in exact if policy.is_on_offer(self.spec.profile))
        return next((policies for policies in shared if self.peak(policies) <= limit), None)

    def _most(self, limit: int, made: Callable[[int], TypePolicies]) -> TypePolicies | None:
        """The policies made of the largest number of blocks that fits; None if not even 0 does."""
        low, high = -1, len(self._relative.policies)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.peak(made(middle)) <= limit else (low, middle - 1)
        return None if low < 0 else made(low)


class _Beside:
    """Prices policies of a block type beside `others`, the plans of other types by name."""

    def __init__(
        self, spec: planner.BlockType, others: Mapping[str, TypePlan], live_sets: Sequence[LiveSet], orders: Orders
    ) -> None:
        specs = {name: plan.spec for name, plan in others.items()} | {spec.name: spec}
        self._others = others
        self._request = PlanRequest(specs, live_sets, orders)
        self._simulations: planner.Simulations = {}  # those of other types are needed again for every price

    def peak(self, policies: TypePolicies) -> int:
        """Predicted peak bytes of the live set that takes the most."""
        problems = map(self._request.problem, self._request.live_sets)
        return max(
            planner.peak_bytes(one, [self._of(each.name, policies) for each in one.block_types], self._simulations)
            for one in problems
        )

    @property
    def without(self) -> int:
        """Predicted peak bytes without checkpointing."""
        return self._request.peak_without(self._simulations)

    def _of(self, name: str, policies: TypePolicies) -> TypePolicies:
        """The policies that are priced; of other block types, those of `others`."""
        return self._others[name].policies if name in self._others else policies
