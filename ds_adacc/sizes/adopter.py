"""Policies for block types at other input sizes, from those of the same programs that were planned for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ds_adacc import planner
from ds_adacc.log import is_logged
from ds_adacc.plan.agreement import Agreement
from ds_adacc.plan.block_type import KnownType, TypePlan
from ds_adacc.plan.live_sets import Alive, TypePolicies
from ds_adacc.plan.peak_estimate import estimated_peak, have_plan
from ds_adacc.plan.plan import Plan
from ds_adacc.sizes.origins import Origins
from ds_adacc.sizes.policy_search import PolicySearch
from ds_adacc.sizes.symbolic_types import SymbolicTypes


class Adopter:
    """Has block types at new input sizes adopt policies: without a solver, and on this rank alone.

    That is due when a block type is new (`adopt_for_type`), when a pass has ended in which it ran beside others
    (`adopt_for_pass`), and when there is a new plan (`adopt_from_plan`).
    """

    def __init__(self, agreement: Agreement, symbolic_types: SymbolicTypes, origins: Origins) -> None:
        self._symbolic_types = symbolic_types
        self._agreement = agreement
        self._origins = origins
        self._above = 0  # how many times policies above the budget were adopted

    def adopt_for_type(self, known: KnownType, like: str, called: Collection[str] = ()) -> None:
        """Put policies in force for a new block type whose program is that of `like` at other input sizes.

        They are searched for without a solver. If none fit, the type waits for a plan. If another rank has met these
        sizes first, there are policies: then this rank's blocks only get their indices. `called`: the block types that
        this pass has called before. They may have adopted policies that take more than what was planned for.
        """
        if known.plan is None:
            self._adopt_if_fits(known, like, called)
        elif not self._agreement.forward_order.names(known.recording.digest):
            self._agreement.forward_order.copy_indices(known.recording.digest, like)

    def adopt_from_plan(self, plan: Plan) -> list[str]:
        """Adopt from a new plan. Returns the block types that were recorded, and have adopted policies from it.

        The other sizes of a program adopt from the largest live set that was planned for. So sizes that come in new
        combinations have all adopted from one live set, in which they were priced together.
        """
        fit = (names for group in plan.groups for names in set(group.live_sets).difference(group.unfit(plan.budget)))
        for names in sorted(fit, key=sorted):
            self._origins.note_planned(names)
        types, adopted = self._agreement.known_types, self._agreement.adopted_types
        recorded = self._symbolic_types.recorded.intersection(adopted, types)
        return [name for name in sorted(recorded) if self._adopt_if_fits(types[name], name)]

    def adopt_for_pass(self, alive: Alive) -> bool:
        """Have block types that ran together adopt policies that were found for one live set.

        Returns whether all of them do. If not, some may have adopted policies, and the live set waits for a plan.
        """
        return (self._origins.exist_for(alive) and self._adopt_together(alive)) or self._exceed(alive)

    def _adopt_together(self, alive: Alive) -> bool:
        """Have those adopt that no rank has planned for. Where all do not fit then, these recompute all that they can.

        Returns whether all fit.
        """
        types, mine = self._agreement.known_types, self._adoptable(alive)
        # Each is priced beside the largest sizes of the others too. What is too large there may fit beside smaller.
        lacking = [name for name in mine if not self._adopt_if_fits(types[name], name, alive, alive[name])]
        is_fit = not lacking and have_plan(self._agreement, alive)
        return is_fit or self._make_lean(alive, lacking) or self._make_lean(alive, mine)

    def _exceed(self, alive: Alive) -> bool:
        """`adopt_for_pass` from a live set of smaller sizes that is above the budget itself.

        These are above it, too. To ask the solver would take its time at every such size. So block types without
        policies take those of the smaller sizes, which are the leanest that the solver found. Returns False if these
        fit after all, as where a budget that is a fraction has grown: then the solver may find quicker ones.
        """
        mine, below, agreement = self._adoptable(alive), self._origins.unfit_below(alive), self._agreement
        limit = agreement.budget.limit
        if limit is None or not (mine and below) or agreement.config.forces_compression:
            return False
        types = agreement.known_types
        lacking = [name for name in mine if types[name].plan is None] or mine
        for name in lacking:
            smaller = types[below[name]]
            types[name].take_over(smaller)
            search = self._search(types[name], smaller.in_force, alive[name])
            agreement.adopt(search.plan(name, search.inherited()), below[name])
        peak = self._leaner(alive, lacking, below)
        if peak > limit:
            self._warn(alive, peak, limit)
        return peak > limit

    def _leaner(self, alive: Alive, lacking: Collection[str], below: Mapping[str, str]) -> int:
        """Have each block type of `lacking` recompute all that it can, if that lowers the peak of all that are alive.

        Returns the peak. A plan above the budget may have left a block type the policies that it had.
        """
        agreement, types = self._agreement, self._agreement.known_types

        def peak_now() -> int:
            return estimated_peak(agreement, (types[name].in_force for name in alive), alive)

        peak = peak_now()
        for name in (each for each in lacking if not types[each].recording.repeats_collectives):
            before = types[name].in_force
            agreement.adopt(_recomputing(before), below[name])
            now = peak_now()
            if now >= peak:
                agreement.adopt(before, below[name])
            peak = min(now, peak)
        return peak

    def _adoptable(self, names: Collection[str]) -> list[str]:
        """Those of the block types that no rank has planned for. What the ranks have planned stays the same on all."""
        return sorted({*names} - self._agreement.planned_types.keys())

    def _adopt_if_fits(self, known: KnownType, like: str, beside: Collection[str] = (), alive: int = 0) -> bool:
        """Have the block type adopt from the one from which `like` adopts. Returns whether it has: False if none fit.

        `beside`: block types that are alive at once with it. `alive`: so many of its calls are, or more.
        """
        agreement = self._agreement
        relative = agreement.known_types.get(self._origins.of(like))
        if agreement.budget.limit is None or relative is None or relative is known:
            return False
        known.take_over(relative)
        if relative.plan is None:
            return False
        plan = relative.plan
        search = self._search(known, plan, alive, beside)
        # If the number of calls varies, only the end of a pass tells what it takes.
        limit = agreement.budget.grown(search.without) if self._origins.is_steady(plan) else agreement.budget.limit
        policies = self._within(limit, search, known, plan)
        if policies is None:
            return False
        agreement.budget.limit = limit
        agreement.adopt(search.plan(known.recording.digest, policies), plan.spec.name)
        return True

    def _within(self, limit: int, search: PolicySearch, known: KnownType, plan: TypePlan) -> TypePolicies | None:
        """Policies for the block type within so many bytes. None if none were found."""
        profile, blocks = search.spec.profile, len(plan.policies)
        if known.recording.repeats_collectives:  # all ranks have agreed on what runs, whatever the sizes
            fixed = self._agreement.repeated_policies(profile, plan.spec.name, blocks)
        elif self._agreement.config.forces_compression:
            fixed = (planner.compress_policy(profile),) * blocks
        else:
            return search.policies(limit)
        return fixed if search.peak(fixed) <= limit else None

    def _search(self, known: KnownType, plan: TypePlan, alive: int, beside: Collection[str] = ()) -> PolicySearch:
        """The policies of the `plan` of another size of its program, priced for this block type.

        The block type takes over the counts of the other one, until a pass of its own has ended. It is priced for at
        least `alive` calls. A policy that awaits its trial is permitted too: its blocks hold everything exactly until
        then.
        """
        agreement = self._agreement
        plan = plan.of_calls(max(alive, known.count, plan.spec.count))
        if known.fewest is None:
            known.count, known.calls_per_block = plan.spec.count, plan.spec.calls_per_block
        # A size that no plan fits is priced beside the others that it was met with, too: alone, all would seem to fit.
        sets, orders = (*agreement.live_sets, *agreement.unfit), agreement.forward_order.orders
        rejected, name = agreement.approvals.is_rejected, plan.spec.name

        def permit(index: int, policy: planner.Policy) -> bool:
            return not rejected((name, index), policy)

        priced, plans, here = self._priced(known, plan), agreement.type_plans, self._adopted_here(beside)
        return PolicySearch(plan, priced, plans, sets, orders, permit, here)

    def _adopted_here(self, names: Collection[str]) -> Mapping[str, TypePlan]:
        """What those of these block types run that have adopted policies, by the type that they have adopted from."""
        adopted = (plan for name, plan in self._agreement.adopted_types.items() if name in names)
        return {plan.origin: replace(plan, spec=replace(plan.spec, name=plan.origin)) for plan in adopted}

    def _make_lean(self, alive: Alive, lean: Collection[str]) -> bool:
        """Have the block types `lean` recompute all that they can, if all that are alive then fit the budget."""
        agreement, types = self._agreement, self._agreement.known_types
        limit = agreement.budget.limit
        lean = [name for name in lean if not types[name].recording.repeats_collectives]
        if limit is None or not lean or agreement.config.forces_compression:
            return False
        found = ((name, self._recomputed(name) if name in lean else types[name].plan) for name in alive)
        plans = {name: each for name, each in found if each is not None}
        if len(plans) < len(alive) or estimated_peak(agreement, plans.values(), alive) > limit:
            return False
        for name in sorted(lean):
            agreement.adopt(plans[name].of_calls(alive[name]), self._origins.of(name), is_priced=False)
        return True

    def _recomputed(self, name: str) -> TypePlan | None:
        """The plan of this size of a program if it recomputes all that it can; None if no size has one."""
        known = self._agreement.known_types[name]
        relative = self._agreement.type_plans.get(self._origins.of(name), known.plan)
        if relative is None:
            return None
        spec = replace(relative.spec, name=name, profile=self._priced(known, relative))
        return _recomputing(replace(relative, spec=spec))

    def _priced(self, known: KnownType, relative: TypePlan) -> planner.Profile:
        """The profile of a block type, with what was learnt of another size of its program."""
        prices, profile = self._agreement.outlier_prices, self._agreement.profile_of(known)
        return relative.correction.applied_to(prices.at_capacity(profile, known, relative.capacity))

    def _warn(self, names: Collection[str], peak: int, limit: int) -> None:
        """Warn of sizes whose blocks take more than the budget without the solver having been asked."""
        self._above += 1
        if is_logged(self._above):
            recordings = (self._agreement.known_types[name].recording for name in sorted(names))
            blocks = ", ".join(dict.fromkeys(recording.name for recording in recordings))
            text = (
                "%s: no plan is known that fits the budget at the new input sizes, as none fits at smaller ones. The "
                "leanest policies found there are in force, with a peak of %s, above the budget of %s (new sizes "
                "like these so far: %d). A smaller micro-batch needs less; a larger memory_budget allows more"
            )
            beside = planner.human_bytes(peak), planner.human_bytes(limit)
            self._agreement.log.warning(text, blocks, *beside, self._above)


def _recomputing(plan: TypePlan) -> TypePlan:
    """The block type if all its blocks recompute all that they can."""
    policies = (planner.recompute_policy(plan.spec.profile),) * len(plan.policies)
    return replace(plan, policies=policies)
