"""From which size of its program a block type adopts policies: what is planned for, and what follows from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ds_adacc import planner
from ds_adacc.plan.agreement import Agreement
from ds_adacc.plan.block_type import TypePlan
from ds_adacc.plan.live_sets import Alive, LiveSet
from ds_adacc.plan.peak_estimate import peak_without
from ds_adacc.sizes.symbolic_types import SymbolicType, SymbolicTypes

_OUTGROWN = 1.25  # times the bytes that were planned for: lengths that grow get a plan now and then, not at each step


class Origins:
    """Finds the block types, and the live sets, from which those at other input sizes can adopt policies."""

    def __init__(self, agreement: Agreement, symbolic_types: SymbolicTypes) -> None:
        self._agreement = agreement
        self._symbolic_types = symbolic_types

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

    def note_planned(self, live_set: LiveSet) -> None:
        """Note that this live set was planned for. The other sizes of its programs adopt from the largest such one."""
        programs = self._programs(live_set)
        without = self._peak_of(live_set) if programs else 0
        for name, program in programs.items():
            if without >= program.origin_bytes or program.origin not in self._agreement.type_plans:
                program.origin, program.origin_bytes = name, without

    def of(self, name: str) -> str:
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

    def exist_for(self, alive: Alive) -> bool:
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

    def are_outgrown_by(self, alive: Alive) -> bool:
        """Whether these have outgrown the live set from which they have adopted: a plan of their own is worth its time.

        They are larger, and fit only because blocks save more memory than those of any plan: a block recomputes
        everything there or nothing, while the solver decides value by value. What adopts from a part of a live set, or
        from one size twice, waits for no plan: plans for ever new combinations would follow.
        """
        agreement, origins = self._agreement, {name: self._agreement.origin(name) for name in alive}
        planned = frozenset(origins.values())
        if len(planned) < len(origins) or planned not in agreement.live_sets or self.unfit_below(alive):
            return False
        if not any(self._is_leaner(name, origin) for name, origin in origins.items()):
            return False
        return peak_without(agreement, alive) >= _OUTGROWN * self._peak_of(planned)

    def unfit_below(self, names: Collection[str]) -> Mapping[str, str]:
        """A live set of these programs for which no plan is known that fits, though no size in it is larger.

        Returns its block type for each of these, by name; none at all if there is no such live set.
        """
        found = (self._matched(names, unfit) for unfit in self._agreement.unfit)
        return next(filter(None, found), {})

    def is_steady(self, plan: TypePlan) -> bool:
        """Whether all passes had as many calls of these programs alive as are planned for, and each of one size.

        These are the program, and those beside which it was planned for: its policies are priced beside these.
        """
        live_sets = [names for names in self._agreement.live_sets if plan.spec.name in names]
        planned = self._agreement.planned_types
        beside = {name: planned[name] for name in frozenset().union(*live_sets) if name in planned}
        programs = {plan.spec.name: plan, **beside}.values()
        return not any(map(self._has_two_sizes, live_sets)) and all(map(self._has_steady_count, programs))

    def _has_two_sizes(self, names: Collection[str]) -> bool:
        """Whether two of these block types are sizes of one program."""
        programs = [program for program in map(self._symbolic_types.of, names) if program is not None]
        return len(set(programs)) < len(programs)

    def _is_leaner(self, name: str, origin: str) -> bool:
        """Whether a block of this type runs a policy that is neither the one of its origin nor to retain everything."""
        types = self._agreement.type_plans
        retain = planner.retain_policy(types[name].spec.profile)
        pairs = zip(types[name].policies, types[origin].policies, strict=True)
        return any(own not in (retain, inherited) for own, inherited in pairs)

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

    def _has_steady_count(self, plan: TypePlan) -> bool:
        """Whether all passes had as many calls of this program alive as are planned for."""
        of, types = self._symbolic_types.of, self._agreement.known_types
        program = of(plan.spec.name)
        alike = (known for name, known in types.items() if program is not None and of(name) is program)
        fewest = [known.fewest for known in alike if known.fewest is not None]
        return not fewest or plan.of_calls(min(fewest)).spec.count == plan.spec.count

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
