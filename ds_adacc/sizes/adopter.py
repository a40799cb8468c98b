"""Policies for block types at other input sizes, from those of the same programs that were planned for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ds_adacc import planner
from ds_adacc.log import is_logged
from ds_adacc.plan.agreement import Agreement
from ds_adacc.plan.block_type import KnownType, TypePlan
from ds_adacc.plan.live_sets import Alive, LiveSet, TypePolicies
from ds_adacc.plan.peak_estimate import estimated_peak, have_plan, peak_without
from ds_adacc.plan.plan import Plan
from ds_adacc.sizes.policy_search import PolicySearch
from ds_adacc.sizes.symbolic_types import SymbolicType, SymbolicTypes

_OUTGROWN = 1.25  # times the bytes that were planned for: lengths that grow get a plan now and then, not at each step


class Adopter:
    """Has block types at new input sizes adopt policies: without a solver, and on this rank alone.

    That is due when a block type is new (`adopt_for_type`), when a pass has ended in which it ran beside others
    (`adopt_for_pass`), and when there is a new plan (`adopt_from_plan`).
    """

    def __init__(self, agreement: Agreement, symbolic_types: SymbolicTypes) -> None:
        self._symbolic_types = symbolic_types
        self._agreement = agreement
        self._above = 0  # how many times policies above the budget were adopted

    def largest(self, live_sets: Collection[LiveSet]) -> tuple[list[LiveSet], list[LiveSet]]:
        """The live sets to plan for, and the others, whose block types can adopt from these.

        Of several that are the same programs at other sizes, only the largest is planned for. Policies that fit there
        are a start for every smaller size.
        """
        alike: dict[frozenset[SymbolicType], list[LiveSet]] = {}
        chosen: list[LiveSet] = []
        for names in live_sets:
            programs = self._programs(names)
            if programs:
                alike.setdefault(frozenset(programs.values()), []).append(names)
            else:
                chosen.append(names)
        chosen += [max(each, key=self._peak_of) for each in alike.values()]
        return chosen, [names for names in live_sets if names not in chosen]

    def adopt_for_type(self, known: KnownType, like: str) -> None:
        """Put policies in force for a new block type whose program is that of `like` at other input sizes.

        They are searched for without a solver. If none fit, the type waits for a plan. If another rank has met these
        sizes first, there are policies: then this rank's blocks only get their indices.
        """
        if known.plan is None:
            self._adopt_if_fits(known, like)
        elif not self._agreement.forward_order.names(known.recording.digest):
            self._agreement.forward_order.copy_indices(known.recording.digest, like)

    def adopt_from_plan(self, plan: Plan) -> list[str]:
        """Adopt from a new plan. Returns the block types that were recorded, and have adopted policies from it.

        The other sizes of a program adopt from the largest live set that was planned for. So sizes that come in new
        combinations have all adopted from one live set, in which they were priced together.
        """
        fit = (names for group in plan.groups for names in set(group.live_sets).difference(group.unfit(plan.budget)))
        for names in sorted(fit, key=sorted):
            self.note_planned(names)
        types, adopted = self._agreement.known_types, self._agreement.adopted_types
        recorded = self._symbolic_types.recorded.intersection(adopted, types)
        return [name for name in sorted(recorded) if self._adopt_if_fits(types[name], name)]

    def adopt_for_pass(self, alive: Alive) -> bool:
        """Have block types that ran together adopt policies that were found for one live set.

        Returns whether all of them do. If not, some may have adopted policies, and the live set waits for a plan.
        """
        return (self._has_origins(alive) and self._adopt_together(alive)) or self._exceed(alive)

    def outgrow(self, alive: Alive) -> bool:
        """Whether these have outgrown the live set from which they have adopted: a plan of their own is worth its time.

        They are larger, and fit only because blocks save more memory than those of any plan: a block recomputes
        everything there or nothing, while the solver decides value by value. Their order is taken to be that of the
        smaller sizes. What adopts from a part of a live set, or from one size twice, waits for no plan: plans for ever
        new combinations would follow.
        """
        agreement, origins = self._agreement, {name: self._agreement.origin(name) for name in alive}
        planned = frozenset(origins.values())
        if len(planned) < len(origins) or planned not in agreement.live_sets or self._unfit_below(alive):
            return False
        if not any(self._is_leaner(name, origin) for name, origin in origins.items()):
            return False
        if peak_without(agreement, alive) < _OUTGROWN * self._peak_of(planned):
            return False
        agreement.forward_order.copy_order(alive, origins)
        return True

    def note_planned(self, live_set: LiveSet) -> None:
        """Note that this live set was planned for. The other sizes of its programs adopt from the largest such one."""
        programs = self._programs(live_set)
        without = self._peak_of(live_set) if programs else 0
        for name, program in programs.items():
            if without >= program.origin_bytes or program.origin not in self._agreement.type_plans:
                program.origin, program.origin_bytes = name, without

    def _is_leaner(self, name: str, origin: str) -> bool:
        """Whether a block of this type runs a policy that is neither the one of its origin nor to retain everything."""
        types = self._agreement.type_plans
        retain = planner.retain_policy(types[name].spec.profile)
        pairs = zip(types[name].policies, types[origin].policies, strict=True)
        return any(own not in (retain, inherited) for own, inherited in pairs)

    def _has_origins(self, alive: Alive) -> bool:
        """Whether a live set was planned for from which all of these can adopt.

        Where two sizes of one program are alive at once, the first such live set is planned for. If each new pair of
        sizes were, planning would not end until every pair had come.
        """
        planned = self._agreement.live_sets
        if self._has_two_sizes(alive):
            return any(map(self._has_two_sizes, planned))
        programs = self._programs(alive.keys())
        origins = {program.origin for program in programs.values() if program.origin is not None}
        return 0 < len(origins) == len(programs) and any(origins <= names for names in planned)

    def _adopt_together(self, alive: Alive) -> bool:
        """Have those adopt that no rank has planned for. Where all do not fit then, these recompute all that they can.

        Returns whether all fit.
        """
        types, mine = self._agreement.known_types, self._adoptable(alive)
        # Each is priced beside the largest sizes of the others. What is too large beside these may fit beside smaller.
        lacking = [name for name in mine if not self._adopt_if_fits(types[name], name, alive[name])]
        is_fit = not lacking and have_plan(self._agreement, alive)
        return is_fit or self._make_lean(alive, lacking) or self._make_lean(alive, mine)

    def _exceed(self, alive: Alive) -> bool:
        """`adopt_for_pass` from a live set of smaller sizes that is above the budget itself.

        These are above it, too. To ask the solver would take its time at every such size. So block types without
        policies take those of the smaller sizes, which are the leanest that the solver found. Returns False if these
        fit after all, as where a budget that is a fraction has grown: then the solver may find quicker ones.
        """
        mine, below, agreement = self._adoptable(alive), self._unfit_below(alive), self._agreement
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

    def _unfit_below(self, names: Collection[str]) -> Mapping[str, str]:
        """A live set of these programs for which no plan is known that fits, though no size in it is larger.

        Returns its block type for each of these, by name; none at all if there is no such live set.
        """
        found = (self._matched(names, unfit) for unfit in self._agreement.unfit)
        return next(filter(None, found), {})

    def _matched(self, names: Collection[str], smaller: Collection[str]) -> Mapping[str, str]:
        """For each block type of `names`, one of `smaller` that is the same program and in no size larger.

        None at all unless each of `smaller` is matched with one of `names`.
        """
        both = {*names, *smaller}
        of = self._known_programs(both)
        if len(names) != len(smaller) or len(of) < len(both):
            return {}

        def in_order(each: Collection[str]) -> list[str]:
            return sorted(each, key=lambda name: (id(of[name]), of[name].sizes(name)))

        pairs = list(zip(in_order(names), in_order(smaller), strict=True))
        fit = all(of[small] is of[large] and of[small].is_at_least(large, small) for large, small in pairs)
        return dict(pairs) if fit else {}

    def _origin(self, name: str) -> str:
        """The block type from which this one adopts, or has adopted; its own name if there is none.

        That of its program; or else, where two sizes of the program have always been alive at once, the one of its
        sizes that was planned for last.
        """
        agreement, program = self._agreement, self._symbolic_types.of(name)
        if program is not None and program.origin in agreement.type_plans:
            return program.origin
        if program is None or name in agreement.type_plans:
            return agreement.origin(name)
        planned = reversed(agreement.planned_types)
        return next((each for each in planned if self._symbolic_types.of(each) is program), name)

    def _adoptable(self, names: Collection[str]) -> list[str]:
        """Those of the block types that no rank has planned for. What the ranks have planned stays the same on all."""
        return sorted({*names} - self._agreement.planned_types.keys())

    def _adopt_if_fits(self, known: KnownType, like: str, alive: int = 0) -> bool:
        """Have the block type adopt from the one from which `like` adopts. Returns whether it has: False if none fit.

        `alive`: so many of its calls are alive at once, or more.
        """
        agreement = self._agreement
        relative = agreement.known_types.get(self._origin(like))
        if agreement.budget.limit is None or relative is None or relative is known:
            return False
        known.take_over(relative)
        if relative.plan is None:
            return False
        plan = relative.plan
        search = self._search(known, plan, alive)
        # If the number of calls varies, only the end of a pass tells what it takes.
        limit = agreement.budget.grown(search.without) if self._is_steady(plan) else agreement.budget.limit
        policies = self._within(limit, search, known, plan)
        if policies is None:
            return False
        agreement.budget.limit = limit
        agreement.adopt(search.plan(known.recording.digest, policies), plan.spec.name)
        return True

    def _within(self, limit: int, search: PolicySearch, known: KnownType, plan: TypePlan) -> TypePolicies | None:
        """Policies for the block type within so many bytes. None if none were found."""
        if known.recording.repeats_collectives:  # all ranks have agreed on what runs, whatever the sizes
            like, blocks = plan.spec.name, len(plan.policies)
            fixed = self._agreement.repeated_policies(search.spec.profile, like, blocks)
            return fixed if search.peak(fixed) <= limit else None
        return search.compressed(limit) if self._agreement.config.forces_compression else search.policies(limit)

    def _is_steady(self, plan: TypePlan) -> bool:
        """Whether all passes had as many calls of these programs alive as are planned for, and each of one size.

        These are the program, and those beside which it was planned for: its policies are priced beside these.
        """
        live_sets = [names for names in self._agreement.live_sets if plan.spec.name in names]
        planned = self._agreement.planned_types
        beside = {name: planned[name] for name in frozenset().union(*live_sets) if name in planned}
        programs = {plan.spec.name: plan, **beside}.values()
        return not any(map(self._has_two_sizes, live_sets)) and all(map(self._has_steady_count, programs))

    def _has_steady_count(self, plan: TypePlan) -> bool:
        """Whether all passes had as many calls of this program alive as are planned for."""
        of, types = self._symbolic_types.of, self._agreement.known_types
        program = of(plan.spec.name)
        alike = (known for name, known in types.items() if program is not None and of(name) is program)
        fewest = [known.fewest for known in alike if known.fewest is not None]
        return not fewest or plan.of_calls(min(fewest)).spec.count == plan.spec.count

    def _search(self, known: KnownType, plan: TypePlan, alive: int) -> PolicySearch:
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

        return PolicySearch(plan, self._priced(known, plan), agreement.type_plans, sets, orders, permit)

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
            agreement.adopt(plans[name].of_calls(alive[name]), self._origin(name), is_priced=False)
        return True

    def _programs(self, names: Collection[str]) -> dict[str, SymbolicType]:
        """The program of each of these block types; none at all if this rank does not know one, or if two share one."""
        programs = self._known_programs(names)
        return programs if len(set(programs.values())) == len(names) else {}

    def _known_programs(self, names: Collection[str]) -> dict[str, SymbolicType]:
        """The program of each of these block types of which this rank knows it."""
        known = ((name, self._symbolic_types.of(name)) for name in sorted(names) if name in self._agreement.known_types)
        return {name: program for name, program in known if program is not None}

    def _peak_of(self, names: LiveSet) -> int:
        return peak_without(self._agreement, self._agreement.alive(names))

    def _has_two_sizes(self, names: Collection[str]) -> bool:
        programs = [program for program in map(self._symbolic_types.of, names) if program is not None]
        return len(set(programs)) < len(programs)

    def _recomputed(self, name: str) -> TypePlan | None:
        """The plan of this size of a program if it recomputes all that it can; None if no size has one."""
        known = self._agreement.known_types[name]
        relative = self._agreement.type_plans.get(self._origin(name), known.plan)
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
