"""Live sets: the block types whose calls are alive at once, and share the budget (bytes).

Each live set has the whole budget, as no two are alive at once. Live sets that share a block type form a group. Each
set of a group is solved alone; a shared block type then takes the policies that hold the fewest bytes, the same in all
of them. The peak of a group is the peak of its largest live set.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ds_adacc import planner
from ds_adacc.config import AdaccConfig

LiveSet = frozenset[str]  # the names of its block types
Orders = Mapping[LiveSet, tuple[str, ...]]  # the block type of each block in forward order, where backward reverses it
Alive = Mapping[str, int]  # how many calls of each block type of a live set are alive at once
TypePolicies = tuple[planner.Policy, ...]  # of a block type's blocks, in forward order


@dataclass(frozen=True)
class Component:
    """Live sets that hang together, and the problem of all their block types, as if all were alive at once."""

    problem: planner.Problem
    live_sets: tuple[LiveSet, ...]

    @property
    def block_types(self) -> tuple[planner.BlockType, ...]:
        return self.problem.block_types

    def solve(self, budget: int, config: AdaccConfig) -> planner.Solution:
        """Policies with which every live set keeps the budget.

        Raises planner.InfeasibleBudget, with a budget at which it will find policies, and planner.NoSolutionInTime.
        """
        seconds = config.solver.max_seconds
        if config.forces_compression:
            solution = self.evaluate(planner.everywhere(planner.compress_policy, self.problem).policies)
            if solution.peak > budget:
                raise planner.InfeasibleBudget(budget, solution.peak)
            return solution
        if len(self.live_sets) == 1:
            return planner.solve_in_process(self.problem, budget, max_seconds=seconds)
        return self._solve_several(budget, seconds)

    def _solve_several(self, budget: int, seconds: float) -> planner.Solution:
        """The stricter policies of the live sets' own solutions, or else those of the smallest peak."""
        share = seconds / len(self.live_sets)  # each varying length of a translator brings another live set
        with contextlib.suppress(planner.InfeasibleBudget):
            solution = self.stricter(lambda one: planner.solve_in_process(one, budget, max_seconds=share), budget)
            if solution.peak <= budget:
                return solution
        # A policy that holds less may need more while its block's backward runs, which broke the budget of another live
        # set. The policies of the smallest peak that all block types can have together are lean in both.
        least = planner.least_peak_in_process(self.problem, max_seconds=seconds / 2)
        solution = replace(self.evaluate(least.policies), fallback=least.fallback)
        if solution.peak > budget:
            raise planner.InfeasibleBudget(budget, solution.peak, proven=False)
        # These were chosen for their bytes alone. Others may be quicker at the same peak.
        with contextlib.suppress(planner.InfeasibleBudget, planner.NoSolutionInTime):
            found = planner.solve_in_process(self.problem, least.peak, max_seconds=seconds / 2)
            quick = replace(self.evaluate(found.policies), fallback=found.fallback)
            if quick.peak <= budget and quick.added_seconds < solution.added_seconds:
                solution = quick
        return solution

    def stricter(self, solver: Callable[[planner.Problem], planner.Solution], budget: int) -> planner.Solution:
        """Solve each live set by itself; a block type takes those policies with which its blocks hold the fewest bytes.

        The live sets that take the most come first. One whose block types have all got policies, and keeps the budget
        with them, is not solved: a solution of its own would change nothing, or take time that is not needed. Whether
        every live set keeps the budget in the end is for the caller to see.
        """
        solutions: list[planner.Solution] = []
        are_all_solved = True
        found: dict[str, list[tuple[int, TypePolicies]]] = {block_type.name: [] for block_type in self.block_types}
        for one in sorted(map(self._part, self.live_sets), key=planner.peak_without, reverse=True):
            if all(found[each.name] for each in one.block_types):
                known = [_leanest(found[each.name]) for each in one.block_types]
                if planner.peak_bytes(one, known) <= budget:
                    are_all_solved = False
                    continue
            solution = solver(one)
            solutions.append(solution)
            for block_type, held, chosen in zip(one.block_types, solution.held, solution.policies, strict=True):
                found[block_type.name].append((held, chosen))
        # a proof holds for a solution of which nothing was replaced
        agree = are_all_solved and all(len({chosen for _, chosen in of_type}) == 1 for of_type in found.values())
        fallback = next((solution.fallback for solution in solutions if solution.fallback), "")
        return replace(
            self.evaluate([_leanest(found[block_type.name]) for block_type in self.block_types]),
            proven_optimal=agree and all(solution.proven_optimal for solution in solutions),
            fallback=fallback,
        )

    def evaluate(self, policies: Sequence[TypePolicies]) -> planner.Solution:
        """What the simulator says of these policies, with the peak of the live set that takes the most."""
        return replace(planner.evaluate_per_block(self.problem, policies), peak=self.peak_of(policies))

    def peak_of(self, policies: Sequence[TypePolicies], known: planner.Simulations | None = None) -> int:
        """Peak bytes of the live set that takes the most; `policies` are by block type of the problem.

        `known`: as of `planner.peak_bytes`.
        """
        return max(planner.peak_bytes(one, chosen, known) for one, chosen in self.by_live_set(policies))

    def seconds_of(self, policies: Sequence[TypePolicies]) -> float:
        """Seconds added to one forward and backward of the live set to which they add the most."""
        return max(planner.added_seconds(one, chosen) for one, chosen in self.by_live_set(policies))

    def by_live_set(self, policies: Sequence[TypePolicies]) -> Iterator[tuple[planner.Problem, list[TypePolicies]]]:
        """Each live set as a problem of its own, with the policies of its block types."""
        chosen = {block_type.name: of_type for block_type, of_type in zip(self.block_types, policies, strict=True)}
        for one in map(self._part, self.live_sets):
            yield one, [chosen[block_type.name] for block_type in one.block_types]

    def _part(self, names: LiveSet) -> planner.Problem:
        """The problem of one live set. That of all has an order only if there is no other live set."""
        members = tuple(block_type for block_type in self.block_types if block_type.name in names)
        return replace(self.problem, block_types=members)


def _leanest(found: Sequence[tuple[int, TypePolicies]]) -> TypePolicies:
    """Those that hold the fewest bytes; each pair has these bytes first."""
    return min(found, key=lambda pair: pair[0])[1]


def components(live_sets: Iterable[Collection[str]]) -> list[LiveSet]:
    """The names of the block types that hang together, because their live sets overlap; sorted."""
    found: list[LiveSet] = []
    for names in live_sets:
        overlapping = [known for known in found if known & set(names)]
        found = [known for known in found if known not in overlapping] + [frozenset(names).union(*overlapping)]
    return sorted(found, key=sorted)


def maximal(live_sets: Iterable[LiveSet]) -> tuple[LiveSet, ...]:
    """The live sets that are part of no other, sorted."""
    distinct = set(live_sets) - {frozenset()}
    return tuple(sorted((s for s in distinct if not any(s < other for other in distinct)), key=sorted))
