"""The paper's planner: one mixed-integer program over all block types, one policy for all blocks of a type (3.3).

It changes the process that it runs in; `solver_process` says how, and keeps that out of the training process.
"""

from __future__ import annotations

from dataclasses import replace

import mip

from ds_adacc.planner.baselines import free_of_cost, peak_without
from ds_adacc.planner.greedy import greedy
from ds_adacc.planner.milp import GAP, BlockTypeModel, at_most, empty_model, found, granule_of, optimise, ties
from ds_adacc.planner.milp_choices import in_quanta
from ds_adacc.planner.policy import Policy
from ds_adacc.planner.problem import Problem
from ds_adacc.planner.solution import (
    InfeasibleBudget,
    NoSolutionInTime,
    Solution,
    check_request,
    evaluate_uniform,
    require_within,
)
from ds_adacc.planner.without_solver import leanest

EXACT_VALUES = 60  # with more, the solver may stop within `GAP` of the optimum


def solve_uniform(problem: Problem, budget: int, *, max_seconds: float) -> Solution:
    """One policy a block type, which add the least time with a peak of at most `budget` bytes (equations 4 to 8).

    The added time is minimal to within 0.1 microseconds; with more than 60 values, to within a 200th of it. Among
    equally quick policies those with the smaller quantization error are preferred, then those that hold fewer bytes.
    The problem's order is not used: backward may take the blocks in any. When `max_seconds` run out, the best policies
    found by then are returned with `proven_optimal` False. The same input gives the same policies, unless time runs
    out.

    Raises InfeasibleBudget if no policies fit (a second search, as long at most, looks for the smallest budget that
    would do), NoSolutionInTime if the search found none, ValueError for a bad argument.
    """
    check_request(budget, max_seconds)
    free = free_of_cost(problem, budget)
    if free is not None:
        return free
    program = UniformModel(problem)
    known = [solution for solution in [greedy(problem, budget)] if solution.peak <= budget]
    for solution in known:
        program.expect(solution)
    optimal = program.minimise_seconds(budget, max_seconds)
    if optimal is None:
        return _smallest(problem, budget, max_seconds)
    solution = evaluate_uniform(problem, program.policies())
    require_within(solution, budget)
    # where a gap to the optimum is allowed, greedy's policies may be quicker
    best = min([solution, *known], key=lambda found: in_quanta(found.added_seconds))
    return replace(best, proven_optimal=optimal)


def least_peak(problem: Problem, max_seconds: float) -> Solution:
    """One policy a block type: those of the smallest peak found in time, whatever time they add.

    They do not depend on measured seconds, so a budget named after their peak still does when all is measured again.
    Raises NoSolutionInTime if none were found, ValueError for a bad argument.
    """
    check_request(0, max_seconds)
    program = UniformModel(problem)
    optimal = program.minimise_peak(max_seconds)
    solution = evaluate_uniform(problem, program.policies())
    return replace(solution, proven_optimal=optimal)


def _smallest(problem: Problem, budget: int, max_seconds: float) -> Solution:
    """The policies of the smallest peak, if they fit: the model rounds sizes up, the simulator does not.

    Raises InfeasibleBudget otherwise.
    """
    program = UniformModel(problem)
    try:
        optimal = program.minimise_peak(max_seconds)
    except NoSolutionInTime:
        # That no policies fit is known. Which budget would do is not: a simple rule's will.
        raise InfeasibleBudget(budget, leanest(problem).peak, proven=False) from None
    solution = evaluate_uniform(problem, program.policies())
    if solution.peak > budget:
        raise InfeasibleBudget(budget, min(program.peak_bytes(), peak_without(problem)), optimal)
    return solution


class UniformModel:
    """The model over all block types. The peak is a variable: bounded by the budget, or minimised."""

    def __init__(self, problem: Problem) -> None:
        self._block_types = problem.block_types
        self._granule = granule_of([block_type.profile for block_type in problem.block_types])
        values = sum(len(block_type.profile.graph.values) for block_type in problem.block_types)
        self._model = empty_model(0.0 if values <= EXACT_VALUES else GAP)
        bound = problem.max_gradient_error
        self._blocks = [
            BlockTypeModel(self._model, block_type, self._granule, bound) for block_type in problem.block_types
        ]
        self._peak = self._model.add_var()
        held = [block.memory.held() for block in self._blocks]
        self._held = self._total(held)
        fetch = self._most([block.variables.host_bytes() for block in self._blocks])
        self._model += self._held + fetch <= self._peak
        cached = [block.memory.cached() for block in self._blocks]
        pairs = zip(self._block_types, cached, strict=True)
        all_cached = mip.xsum(block_type.blocks * expr for block_type, expr in pairs)
        for block, own, own_cached in zip(self._blocks, held, cached, strict=True):
            block.watch(self._held - own + fetch, all_cached - own_cached, mip.xsum([self._peak]))

    def expect(self, guess: Solution) -> None:
        """Add at once the constraints that this guess comes closest to breaking."""
        for block, policies in zip(self._blocks, guess.policies, strict=True):
            block.expect(policies[0])

    def minimise_peak(self, max_seconds: float) -> bool:
        """Find the policies of the smallest peak; returns what `found` does."""
        self._model.objective = mip.minimize(self._peak)
        return found(optimise(self._model, self._blocks, max_seconds))

    def minimise_seconds(self, budget: int, max_seconds: float) -> bool | None:
        """Find the policies of the least time; returns what `optimise` does.

        Error and held bytes break ties.
        """
        self._peak.ub = at_most(budget, self._granule)
        quanta = self._total([block.variables.quanta() for block in self._blocks])
        error = self._total([block.variables.error() for block in self._blocks])
        self._model.objective = mip.minimize(quanta + ties(error, self._held))
        return optimise(self._model, self._blocks, max_seconds)

    def peak_bytes(self) -> int:
        """The peak found in bytes, with the model's rounding up."""
        return round(self._peak.x) * self._granule

    def policies(self) -> list[Policy]:
        """The solution found, one policy per block type."""
        return [block.variables.policy() for block in self._blocks]

    def _total(self, expressions: list[mip.LinExpr]) -> mip.LinExpr:
        """The sum over all calls of all block types."""
        return mip.xsum(
            block_type.count * expr for block_type, expr in zip(self._block_types, expressions, strict=True)
        )

    def _most(self, expressions: list[mip.LinExpr]) -> mip.LinExpr:
        """A variable of at least the largest of these sums over binaries; 0 if all of them are empty."""
        present = [expression for expression in expressions if expression.expr]
        if not present:
            return mip.xsum([])
        most = self._model.add_var()
        for expression in present:
            self._model += most >= expression
        return mip.xsum([most])
