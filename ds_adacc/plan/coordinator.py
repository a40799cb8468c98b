"""Makes all ranks agree on one plan."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from ds_adacc import planner
from ds_adacc.plan.agreement import Agreement
from ds_adacc.plan.available import available_bytes
from ds_adacc.plan.block_type import TypePlan
from ds_adacc.plan.budget_error import explained, fraction
from ds_adacc.plan.comparison import compare
from ds_adacc.plan.correction import Correction
from ds_adacc.plan.live_sets import LiveSet, Orders, components, maximal
from ds_adacc.plan.plan import Plan, PlanRequest
from ds_adacc.plan.rank_reports import (
    RankAnswer,
    RankReport,
    RankRequest,
    merge_block_type,
    merge_capacity,
    merge_corrections,
    merge_orders,
    merge_profiles,
    merge_requests,
)
from ds_adacc.plan.ranks import Ranks
from ds_adacc.plan.repeated_collectives import Repeatable, RepeatableByAll
from ds_adacc.plan.solve import Forgiven, solve, with_advice


class Coordinator:
    """Changes an `Agreement` on all ranks at once, when the step controller calls for it.

    Ranks communicate only in `decide`, which all of them call in the same step. The first rank solves for the block
    types that any rank has measured.
    """

    def __init__(self, agreement: Agreement, ranks: Ranks) -> None:
        self.agreement = agreement
        self.ranks = ranks

    def decide(
        self,
        live_sets: Collection[LiveSet],
        device: torch.device | None,
        reason: str,
        forgiven: Forgiven = Forgiven.NONE,
        capacity: Mapping[str, Mapping[int, int]] | None = None,
        corrections: Mapping[str, Correction] | None = None,
        repeatable: Repeatable | None = None,
    ) -> Plan:
        """Agree on policies for these live sets and all sets that share block types with them. Put them in force.

        Every rank must call. Each may pass different live sets, and a reason or "". `capacity` (the same on all ranks)
        and `corrections` (measured on this rank) are by block type, and replace the agreed ones. The first plan
        converts a budget that is a fraction or "auto" into bytes; later plans use that number. `device` is None on a
        rank that has run no block yet; the memory of the other ranks then sets the budget. `repeatable`: the blocks
        whose collectives this rank can call again; None: none.

        Raises on every rank what the first rank raises and what is not `forgiven`: planner.InfeasibleBudget and
        planner.NoSolutionInTime. In that case the policies stay, but what was measured of blocks that have got another
        index is forgotten. If it is forgiven, policies take the solver's place as `solve` says, with a warning.
        """
        agreement = self.agreement
        # 1. What does any rank ask for?
        own = RankRequest(frozenset(live_sets), frozenset(agreement.grown), frozenset(agreement.reindexed), reason)
        asked = merge_requests(self.ranks.gather(own))
        agreement.approvals.forget(asked.reindexed)
        agreement.reindexed = set()
        # A type of which more calls were alive may have been so in the new live sets alone. Its others come again.
        live = maximal((*(s for s in agreement.live_sets if s.isdisjoint(asked.grown)), *asked.live_sets))
        # 2. What does each rank know of it? Live sets that share block types share policies: all are planned together.
        touched = {name for names in components(live) if any(names & s for s in asked.live_sets) for name in names}
        reports = {
            digest: self._report(digest, capacity or {}, corrections or {})
            for digest in sorted(touched & agreement.known_types.keys())
        }
        available = None
        if device is not None:
            available = available_bytes(device, self._recomputed_peak(live), agreement.budget.peak)
        passes = agreement.passes.within(reports.keys())
        answer = RankAnswer(reports, passes, agreement.forward_order.orders, available, repeatable or Repeatable())
        everyone = self.ranks.gather(answer)
        # 3. The first rank solves. Block types that no rank has any more are left out.
        present = frozenset(digest for each in everyone for digest in each.reports)
        sets, orders = maximal(names & present for names in live), merge_orders([each.orders for each in everyone])
        by_all = RepeatableByAll([each.repeatable for each in everyone])
        plan, planned = self.ranks.on_first(lambda: self._solve(everyone, sets, orders, asked.reason, forgiven, by_all))
        # 4. Every rank puts the same policies in force.
        self._warn(plan)
        agreement.forward_order.orders = orders
        agreement.budget.limit = max(plan.budget, agreement.budget.limit or 0)
        agreement.set_planned(planned)
        agreement.repeated = by_all.repeated(agreement.repeated, planned)
        self._remember((*(names for names in live if not names & touched), *sets), plan)
        agreement.forget_planned(by_all.superseded(planned, agreement.planned_types.keys()))
        return plan

    def _warn(self, plan: Plan) -> None:
        """Warn of policies that are not the solver's, before they come into force."""
        warned = set()
        for group in plan.groups:
            kept = [self.agreement.runs(each.name, plan.policies[each.name]) for each in group.block_types]
            stays = all(kept)
            if group.solution.fallback and not group.shortfall and group.solution.fallback not in warned:
                warned.add(group.solution.fallback)
                which = "the old plan stays in force" if stays else "a plan of simple rules is in force"
                text = "%s, which keeps the budget but may be slower than the solver's. The reason: %s"
                self.agreement.log.warning(text, which, with_advice(group.solution.fallback, self.agreement.config))
            if group.shortfall:
                if stays:
                    which = "The old plan stays in force"
                elif any(kept):
                    which = "New blocks take the leanest policies found, and the others keep theirs"
                else:
                    which = "New policies are in force"
                text = (
                    'no plan is known that fits the budget of %s. %s, with a peak of %s. "memory_budget": %s would '
                    "allow it. A smaller micro-batch needs less. The reason: %s"
                )
                peak, reason = group.solution.peak, group.shortfall.rstrip(".")
                peak_text, budget_text = planner.human_bytes(peak), planner.human_bytes(plan.budget)
                self.agreement.log.warning(text, budget_text, which, peak_text, fraction(peak, plan.without), reason)

    def _remember(self, live_sets: Iterable[LiveSet], plan: Plan) -> None:
        """Keep the live sets for later plans, except those that no plan fits: they would make others fail too."""
        unfit = {names for group in plan.groups if group.shortfall for names in group.unfit(plan.budget)}
        fit = {names for group in plan.groups for names in group.live_sets} - unfit
        before = (names for names in self.agreement.unfit if not any(names <= planned for planned in fit))
        live = frozenset(self.agreement.type_plans)
        self.agreement.unfit = maximal(names for names in (*before, *unfit) if names <= live)
        self.agreement.live_sets = maximal(names & live for names in set(live_sets) - unfit)

    def _report(
        self, digest: str, capacity: Mapping[str, Mapping[int, int]], corrections: Mapping[str, Correction]
    ) -> RankReport:
        known = self.agreement.known_types[digest]
        channels = {**known.capacity, **capacity.get(digest, {})}
        shares_inputs = not self.agreement.lacks_errors(known)
        profile = self.agreement.profile_of(known, self.agreement.inputs.shared_if(shares_inputs))
        correction = corrections.get(digest)
        return RankReport(profile, known.count, known.calls_per_block, channels, correction, shares_inputs)

    def _recomputed_peak(self, live_sets: Iterable[LiveSet]) -> int:
        """Predicted peak bytes of this rank's blocks if they recompute all that they can."""
        own = {
            digest: planner.BlockType(digest, self.agreement.profile_of(block_type), block_type.count)
            for digest, block_type in self.agreement.known_types.items()
        }
        sets = [tuple(own[name] for name in sorted(names & own.keys())) for names in live_sets]
        problems = (planner.Problem(block_types) for block_types in sets if block_types)
        return max((planner.everywhere(planner.recompute_policy, each).peak for each in problems), default=0)

    def _solve(
        self,
        everyone: Sequence[RankAnswer],
        live_sets: Sequence[LiveSet],
        orders: Orders,
        reason: str,
        forgiven: Forgiven,
        by_all: RepeatableByAll,
    ) -> tuple[Plan, tuple[TypePlan, ...]]:
        """The plan, and the new `TypePlan` of each of its block types, from what all ranks have told."""
        agreement, merged = self.agreement, self._merge([answer.reports for answer in everyone], by_all)
        specs = {digest: each.spec for digest, each in merged.items()}
        passes = [alive for answer in everyone for alive in answer.passes]
        request = PlanRequest(specs, live_sets, orders, agreement.approvals.aim, passes)
        without = request.peak_without()
        available = (answer.available for answer in everyone if answer.available is not None)
        budget = agreement.budget.of_plan(without, min(available))
        in_force = {  # () for a block type whose policies were rejected, or not measured yet
            digest: each.policies if agreement.may_all_run(digest) else ()
            for digest, each in agreement.type_plans.items()
        }
        began = time.perf_counter()
        try:
            groups = solve(request, budget, agreement.config, in_force, forgiven)
        except planner.InfeasibleBudget as error:
            recordings = {digest: known.recording for digest, known in agreement.known_types.items()}
            asked = agreement.budget.asked(error.budget)
            raise explained(error, asked, request, without, recordings) from None
        seconds = time.perf_counter() - began
        plan = Plan(groups, budget, without, reason, compare(groups, budget), seconds)
        chosen = plan.policies
        planned = (replace(merged[each.name], spec=each, policies=chosen[each.name]) for each in plan.block_types)
        return plan, tuple(planned)

    def _merge(self, everyone: Sequence[Mapping[str, RankReport]], by_all: RepeatableByAll) -> dict[str, TypePlan]:
        """The ranks' reports on each block type merged into one `TypePlan`, without policies yet, by digest."""
        merged = {}
        for digest in sorted({digest for each in everyone for digest in each}):
            reports = [each[digest] for each in everyone if digest in each]
            old = self.agreement.type_plans.get(digest)
            before = Correction() if old is None else old.correction
            capacity = merge_capacity(report.capacity for report in reports)
            correction = merge_corrections(reports, before)
            known, prices = self.agreement.known_types.get(digest), self.agreement.outlier_prices
            profile = correction.applied_to(prices.at_capacity(merge_profiles(reports), known, capacity))
            profile = by_all.restrict(digest, profile)
            spec = merge_block_type(digest, profile, reports)
            spec = replace(spec, strictness=self.agreement.approvals.strictness(digest, spec.blocks))
            shares_inputs = all(report.shares_inputs for report in reports)
            merged[digest] = TypePlan(spec, (), capacity, correction, shares_inputs)
        return merged
