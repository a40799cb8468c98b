"""The planner of a policy for each block.

Different policies per block use budget that a single policy for all blocks of a type would waste. A block may take any
point of its block type's frontier, or the policy that `solve_uniform` found.

Frontiers are quick: each is of one block. `solve_uniform` sees besides what backward needs beyond the bytes held, but
it searches for all block types at once. With several of them it may find nothing in minutes. So with more than a few
values the frontiers come first. If their points fit, and the order of the blocks is known, they are the answer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from ds_adacc.planner.baselines import free_of_cost
from ds_adacc.planner.frontier import Point, frontier
from ds_adacc.planner.milp_per_block import PerBlockModel
from ds_adacc.planner.mix_points import mix_points
from ds_adacc.planner.policy import Policy
from ds_adacc.planner.problem import Problem
from ds_adacc.planner.solution import (
    InfeasibleBudget,
    NoSolutionInTime,
    Solution,
    check_request,
    evaluate_per_block,
    require_within,
)
from ds_adacc.planner.solve_uniform import EXACT_VALUES, least_peak, solve_uniform
from ds_adacc.planner.without_solver import without_solver


def solve_per_block(problem: Problem, budget: int, *, max_seconds: float) -> Solution:
    """A policy for each block, which together add the least time with a peak of at most `budget` bytes.

    With at most 60 values it is never slower than `solve_uniform`, whose policies are then among the choices. When
    `max_seconds` run out, the best policies found by then are returned, or those of simple rules if these are quicker.
    Raises InfeasibleBudget if none on offer fit, which is never concluded from a search that was cut short;
    NoSolutionInTime if none were found, and whether there are any is not known; ValueError for a bad argument.
    """
    check_request(budget, max_seconds)
    free = free_of_cost(problem, budget)
    if free is not None:
        return free
    return _without_needless_copies(problem, budget, _Search(problem, budget, max_seconds).solution())


class _Search:
    """The searches for one problem, which share the time."""

    def __init__(self, problem: Problem, budget: int, max_seconds: float) -> None:
        self._problem = problem
        self._budget = budget
        self._max_seconds = max_seconds
        self._deadline = time.perf_counter() + max_seconds
        self._why = f"the solver found no policy in {max_seconds:.3g} seconds"
        self._are_whole = True  # the frontiers: none was cut short

    def solution(self) -> Solution:
        """The best policies found. Raises InfeasibleBudget and NoSolutionInTime as `solve_per_block` does."""
        values = sum(len(block_type.profile.graph.values) for block_type in self._problem.block_types)
        quick = self._of_points() if values > EXACT_VALUES else None
        if quick is None:
            return self._from_single()
        if self._problem.order:
            return quick
        try:
            single = solve_uniform(self._problem, self._budget, max_seconds=self._left() / 2)
            return _quickest([quick, self._with(single)])
        except (InfeasibleBudget, NoSolutionInTime):
            return quick

    def _from_single(self) -> Solution:
        """One policy for all blocks of a type, or policies per block if these are better."""
        try:
            single = solve_uniform(self._problem, self._budget, max_seconds=self._left())
        except InfeasibleBudget as refusal:
            return self._without(refusal)
        except NoSolutionInTime:
            return self._by_rules()
        return self._with(single)

    def _of_points(self) -> Solution | None:
        """The best policies among the points of the frontiers; None if none of those found in time fit."""
        with contextlib.suppress(NoSolutionInTime):
            found = self._best()
            return found if found is None or found.proven_optimal else _quickest([found, *self._mixed()])
        return None

    def _with(self, single: Solution) -> Solution:
        """The best policies per block, or `single`, one for all blocks of a type, if none are better."""
        # Only blocks of one type can differ; and in a known order, the peak depends on which of them runs what.
        if not self._problem.order and all(block_type.blocks == 1 for block_type in self._problem.block_types):
            return single
        try:
            found = self._best([policies[0] for policies in single.policies])
        except NoSolutionInTime:
            # it may be proven that no single policy is better, but not that no policies per block are
            return replace(_quickest([single, *self._mixed()]), proven_optimal=False)
        return single if found is None else replace(_quickest([single, found]), proven_optimal=found.proven_optimal)

    def _without(self, refusal: InfeasibleBudget) -> Solution:
        """Policies per block where no single one for all blocks of a type fits."""
        # In an unknown order the peak is what all calls hold, and the largest transient. Where each block takes that
        # policy of its block type which holds the least, neither grows: if any policies fit, one for all does.
        if not self._problem.order:
            raise refusal
        try:
            least = least_peak(self._problem, self._left() / 4)
            lean = [policies[0] for policies in least.policies]
            found = self._best(lean, is_reproducible=False)
            if found is not None:
                return found
            if not (self._are_whole and least.proven_optimal):
                return self._by_rules(refusal)
        except NoSolutionInTime:
            return self._by_rules(refusal)
        raise self._refusal(refusal, lean)

    def _by_rules(self, refusal: InfeasibleBudget | None = None) -> Solution:
        """The quicker of what `without_solver` finds and a mix of the points that the solver has found.

        `refusal`: of the search for a single policy, which has already found a budget that would do. Raises what
        `without_solver` raises.
        """
        found = [*self._mixed()]
        try:
            found.append(without_solver(self._problem, self._budget, self._why))
        except InfeasibleBudget as other:
            smallest = other.smallest if refusal is None else min(other.smallest, refusal.smallest)
            raise InfeasibleBudget(self._budget, smallest, proven=other.proven) from None
        except NoSolutionInTime:
            found = found or [*self._of_least_peak()]
            if not found:
                raise
        return replace(_quickest(found), fallback=self._why)

    def _of_least_peak(self) -> Iterator[Solution]:
        """The policies of the smallest peaks that are found, as far as they fit.

        An error may have named the budget for these. The search for the least time may find none at so tight a budget,
        and it has taken all of its time: these get half of that again.
        """
        self._deadline = time.perf_counter() + self._max_seconds / 2
        with contextlib.suppress(NoSolutionInTime):
            least = least_peak(self._problem, self._left() / 2)
            if least.peak <= self._budget:
                yield least
            model = self._of_smallest_peak([policies[0] for policies in least.policies])
            mixed = evaluate_per_block(self._problem, model.policies())
            if mixed.peak <= self._budget:
                yield mixed

    def _mixed(self) -> Iterator[Solution]:
        """A mix of the points that were found in time, by a rule, if that finds any."""
        with contextlib.suppress(NoSolutionInTime):
            mixed = mix_points(self._problem, self._frontiers, self._budget)
            if mixed is not None:
                yield mixed

    def _refusal(self, refusal: InfeasibleBudget, lean: Sequence[Policy]) -> InfeasibleBudget:
        """The refusal, with the smallest peak of a policy per block if that is less than of one policy for all."""
        try:
            smallest = self._of_smallest_peak(lean).peak_bytes()
        except NoSolutionInTime:
            return refusal
        return refusal if refusal.smallest <= smallest else InfeasibleBudget(self._budget, smallest, proven=False)

    def _of_smallest_peak(self, lean: Sequence[Policy]) -> PerBlockModel:
        """The model with the policies of the smallest peak that mixes the leanest points and these policies.

        Which other points there are depends on measured seconds. A budget that is named after this peak must do when
        all is measured again.
        """
        model = self._model([of_type[-1:] for of_type in self._frontiers], lean)
        model.minimise_peak(self._left())
        return model

    def _best(self, others: Sequence[Policy] = (), is_reproducible: bool = True) -> Solution | None:
        """The best policies among the points of the frontiers and the others of `_model`; None if none fit."""
        model = self._model(self._frontiers, others)
        optimal = model.minimise_seconds(self._budget, self._left(), is_reproducible)
        if optimal is None:
            return None
        solution = evaluate_per_block(self._problem, model.policies())
        require_within(solution, self._budget)
        return replace(solution, proven_optimal=optimal and self._are_whole)

    def _model(self, frontiers: Sequence[Sequence[Point]], others: Sequence[Policy]) -> PerBlockModel:
        """The model in which blocks take one of these points or, if given, the other policy of their block type."""
        choices: list[list[Point]] = [list(of_type) for of_type in frontiers]
        for place, policy in enumerate(others):
            if all(point.policy != policy for point in choices[place]):  # each policy is offered once
                choices[place].append(Point.of(self._problem.block_types[place].profile, policy))
        model = PerBlockModel(self._problem, choices)
        model.expect(others or [min(of_type, key=_peak).policy for of_type in choices])
        return model

    @cached_property
    def _frontiers(self) -> list[tuple[Point, ...]]:
        """The frontier of each block type, or what of it is found in half of the time that is left.

        Where forward has the peak, what caches hold counts as what is held does. So a block type of which they hold
        something has the points of that frontier too.
        """
        deadline, block_types = time.perf_counter() + self._left() / 2, self._problem.block_types
        found: list[list[Point]] = [[] for _ in block_types]
        wanted = [(place, False) for place in range(len(block_types))]
        wanted += [(place, True) for place, each in enumerate(block_types) if each.profile.graph.has_cached]
        for number, (place, with_cached) in enumerate(wanted):
            began, bound = time.perf_counter(), self._problem.max_gradient_error
            seconds = max(deadline - began, 1e-9) / (len(wanted) - number)
            blocks, profile = block_types[place].blocks, block_types[place].profile
            points = frontier(
                profile, max_seconds=seconds, blocks=blocks, max_gradient_error=bound, with_cached=with_cached
            )
            self._are_whole &= time.perf_counter() - began < seconds
            known = {point.policy for point in found[place]}
            found[place] = [*(point for point in points if point.policy not in known), *found[place]]
        return [tuple(sorted(points, key=_held, reverse=True)) for points in found]

    def _left(self) -> float:
        left = self._deadline - time.perf_counter()
        if left <= 0:
            raise NoSolutionInTime(self._why)
        return left


def _without_needless_copies(problem: Problem, budget: int, solution: Solution) -> Solution:
    """Keep on the device what the last block in forward order would offload, if that fits as well.

    Backward begins with this block, so its values are on the device to the end. They would be copied to the host for
    nothing, and backward would wait for that.
    """
    if not problem.order:
        return solution
    policies = [list(of_type) for of_type in solution.policies]
    of_last = policies[problem.rows[-1][0]]
    of_last[-1] = of_last[-1].on_device
    found = evaluate_per_block(problem, policies)
    if found.peak > budget or found.added_seconds > solution.added_seconds:
        return solution
    return replace(found, proven_optimal=solution.proven_optimal, fallback=solution.fallback)


def _held(point: Point) -> int:
    return point.simulation.held


def _peak(point: Point) -> int:
    return point.simulation.held + point.simulation.transient


def _quickest(solutions: Sequence[Solution]) -> Solution:
    return min(solutions, key=lambda solution: (solution.added_seconds, solution.error))
