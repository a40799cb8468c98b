"""The paper's planner: one mixed-integer program over all block types, one policy a block type (section 3.3).

The first search in a process installs CBC's own handlers for SIGABRT, SIGFPE and SIGSEGV, and each model leaks about
34 KB; `solve_in_process` keeps both out of the training process.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace

import mip

from ds_adacc.planner.baselines import retain_policy
from ds_adacc.planner.greedy import greedy
from ds_adacc.planner.model import Watched, empty_model, granule_of, optimise, share
from ds_adacc.planner.policy import Policy
from ds_adacc.planner.problem import Problem
from ds_adacc.planner.program import QUANTUM_SECONDS
from ds_adacc.planner.solution import InfeasibleBudget, Solution, check_request, evaluate_uniform

_EXACT_VALUES = 60
_GAP = 5e-3  # for more values, of the time added: below what can be measured


def solve_uniform(problem: Problem, budget: int, *, max_seconds: float) -> Solution:
    """One policy a block type, which add the least time with a peak of at most `budget` bytes (equations 4 to 8).

    Times count to 0.1 microseconds, and with more than 60 values to a 200th of their sum. Among equals a small
    quantization error is preferred, then few bytes held. `max_seconds` bounds the search; the best policies found by
    then come back with `proven_optimal` False. The same input gives the same policies, unless time runs out. Backward
    may take the blocks in any order.

    Raises InfeasibleBudget if no policy fits (after a second search, as long at most, for what would),
    NoSolutionInTime if the search ended with nothing, ValueError for a bad argument.
    """
    check_request(budget, max_seconds)
    started = time.perf_counter()
    plain = evaluate_uniform(
        problem, [retain_policy(block_type.profile) for block_type in problem.block_types], started, True
    )
    if plain.added_seconds == 0 and plain.peak <= budget:
        return plain
    program, known = _Program(problem), []
    with contextlib.suppress(InfeasibleBudget):
        known = [greedy(problem, budget, max_seconds=max_seconds)]
        program.expect(known[0])
    optimal = program.minimise_seconds(budget, max_seconds)
    if optimal is None:
        return _smallest(problem, budget, started, max_seconds)
    solution = evaluate_uniform(problem, program.policies(), started, optimal)
    if solution.peak > budget:
        raise RuntimeError(f"the model took a policy {solution.peak - budget} bytes over the budget: a planner bug")
    # where a gap is allowed, greedy's may be the quicker
    best = min([solution, *known], key=lambda found: round(found.added_seconds / QUANTUM_SECONDS))
    return replace(best, solve_seconds=time.perf_counter() - started, proven_optimal=optimal)


def smallest_peak(problem: Problem, max_seconds: float) -> int:
    """The smallest peak in bytes that any policies reach, rounded up to the granule; a budget of as much is feasible.

    The smallest found, if `max_seconds` run out first. Raises NoSolutionInTime if none was, ValueError for a bad
    argument.
    """
    check_request(0, max_seconds)
    program = _Program(problem)
    program.minimise_peak(max_seconds)
    return program.peak_bytes()


def least_peak(problem: Problem, max_seconds: float) -> Solution:
    """One policy a block type, of the smallest peak found in time, whatever time they add.

    They do not depend on measured seconds, so neither does a smallest budget that is named after them. Raises
    NoSolutionInTime if none was found, ValueError for a bad argument.
    """
    check_request(0, max_seconds)
    started = time.perf_counter()
    program = _Program(problem)
    optimal = program.minimise_peak(max_seconds)
    return evaluate_uniform(problem, program.policies(), started, bool(optimal))


def _smallest(problem: Problem, budget: int, started: float, max_seconds: float) -> Solution:
    """The policies of smallest peak, which may fit where the model's rounding up does not; else InfeasibleBudget."""
    program = _Program(problem)
    optimal = program.minimise_peak(max_seconds)
    solution = evaluate_uniform(problem, program.policies(), started, False)
    if solution.peak > budget:
        raise InfeasibleBudget(budget, program.peak_bytes(), bool(optimal))
    return solution


class _Program:
    """The model over all block types, with the peak as a variable: held under the budget, or itself to be minimised."""

    def __init__(self, problem: Problem) -> None:
        self._block_types = problem.block_types
        self._granule = granule_of([block_type.profile for block_type in problem.block_types])
        values = sum(len(block_type.profile.graph.values) for block_type in problem.block_types)
        self._model = empty_model(0.0 if values <= _EXACT_VALUES else _GAP)
        bound = problem.max_gradient_error
        self._blocks = [Watched(self._model, block_type, self._granule, bound) for block_type in problem.block_types]
        self._peak = self._model.add_var()
        held = [block.memory.held() for block in self._blocks]
        self._held = self._total(held)
        fetch = self._most([block.memory.fetched() for block in self._blocks])
        self._model += self._held + fetch <= self._peak
        for block, own in zip(self._blocks, held, strict=True):
            block.watch(self._held - own + fetch, mip.xsum([self._peak]))

    def expect(self, guess: Solution) -> None:
        """What the solution may be like."""
        for block, policies in zip(self._blocks, guess.policies, strict=True):
            block.expect(policies[0])

    def minimise_peak(self, max_seconds: float) -> bool | None:
        """Find policies of the smallest peak; as `optimise`."""
        self._model.objective = mip.minimize(self._peak)
        return optimise(self._model, self._blocks, max_seconds)

    def minimise_seconds(self, budget: int, max_seconds: float) -> bool | None:
        """Find policies of the least time, error and held bytes adding less than half a quantum to that."""
        # peaks are whole granules: half of one keeps an exact fit clear of CBC's tolerances
        self._peak.ub = budget // self._granule + 0.5
        quanta = self._total([block.program.quanta() for block in self._blocks])
        error = self._total([block.program.error() for block in self._blocks])
        self._model.objective = mip.minimize(quanta + share(error, 0.45) + share(self._held, 0.045))
        return optimise(self._model, self._blocks, max_seconds)

    def peak_bytes(self) -> int:
        """The peak found, as the model rounds it up."""
        return round(self._peak.x) * self._granule

    def policies(self) -> list[Policy]:
        """The solution found, one policy per block type."""
        return [block.program.policy() for block in self._blocks]

    def _total(self, expressions: list[mip.LinExpr]) -> mip.LinExpr:
        """The sum over all calls of all block types."""
        return mip.xsum(
            block_type.count * expr for block_type, expr in zip(self._block_types, expressions, strict=True)
        )

    def _most(self, expressions: list[mip.LinExpr]) -> mip.LinExpr:
        """A bound on the largest of several sums over binaries, 0 if all of them are empty."""
        present = [expression for expression in expressions if expression.expr]
        if not present:
            return mip.xsum([])
        most = self._model.add_var()
        for expression in present:
            self._model += most >= expression
        return mip.xsum([most])
