"""The planner proper: one mixed-integer program over all kinds of blocks, solved by CBC (paper, section 3.3).

CBC works with tolerances, a budget is exact. So the model counts in granules of bytes, few enough that tolerances
never add up to one: the greatest common divisor of all sizes where that will do. Else sizes are rounded up, which is
always safe, and costs at most a 2^17th of the largest size for each value held.

The first search in a process installs CBC's own handlers for SIGABRT, SIGFPE and SIGSEGV, and each model leaks about
34 KB; `solve_isolated` keeps both out of the training process.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence

import mip
from ds_adacc.planner.baselines import retain_policy
from ds_adacc.planner.memory import BlockMemory
from ds_adacc.planner.policy import Policy
from ds_adacc.planner.profile import CodecCost, Kind, Profile
from ds_adacc.planner.program import BlockProgram
from ds_adacc.planner.solution import (
    InfeasibleBudget,
    NoSolutionInTime,
    Solution,
    check_budget,
    check_request,
    evaluate,
)
from ds_adacc.planner.together import Together, groups_of

_QUANTUM_SECONDS = 1e-7
# granules in the largest size: fewer than the inverse of CBC's tolerance, which is 1e-6
_LARGEST = 2**17
_FOUND = (mip.OptimizationStatus.OPTIMAL, mip.OptimizationStatus.FEASIBLE)
_INFEASIBLE = (mip.OptimizationStatus.INFEASIBLE, mip.OptimizationStatus.INT_INFEASIBLE)


def solve(kinds: Sequence[Kind], budget: int, *, max_seconds: float, together: Together = None) -> Solution:
    """The policies that add the least time with a peak of at most `budget` bytes (paper, equations 4 to 8).

    `together` are the sets of kinds, by name, whose calls are alive at once: each has the whole budget, a kind in
    several has one policy for all. None: all share it.

    Times count to 0.1 microseconds; among equals a small quantization error is preferred, then few bytes held.
    `max_seconds` bounds the search; the best policy found by then comes back with `proven_optimal` False. The
    same input gives the same policies, unless time runs out.

    Raises InfeasibleBudget if no policy fits (after a second search, as long at most, for what would),
    NoSolutionInTime if the search ended with nothing, ValueError for a bad argument.
    """
    check_request(kinds, max_seconds)
    check_budget(budget)
    started = time.perf_counter()
    plain = evaluate(kinds, [retain_policy(kind.profile) for kind in kinds], started, True, together)
    if plain.added_seconds == 0 and plain.peak <= budget:
        return plain
    program = _Program(kinds, together)
    status = program.minimise_seconds(budget, max_seconds)
    if status in _INFEASIBLE:
        return _smallest(kinds, budget, started, max_seconds, together)
    solution = evaluate(kinds, program.policies(), started, status == mip.OptimizationStatus.OPTIMAL, together)
    if solution.peak > budget:
        raise RuntimeError(f"the model took a policy {solution.peak - budget} bytes over the budget: a planner bug")
    return solution


def smallest_peak(kinds: Sequence[Kind], max_seconds: float, together: Together = None) -> int:
    """The smallest peak in bytes that any policies reach, rounded up to the granule; a budget of as much is feasible.

    The smallest found, if `max_seconds` run out first. Raises NoSolutionInTime if none was, ValueError for a bad
    argument.
    """
    check_request(kinds, max_seconds)
    program = _Program(kinds, together)
    program.minimise_peak(max_seconds)
    return program.peak_bytes()


def _smallest(kinds: Sequence[Kind], budget: int, started: float, max_seconds: float, together: Together) -> Solution:
    """The policies of smallest peak, which may fit where the model's rounding up does not; else InfeasibleBudget."""
    program = _Program(kinds, together)
    status = program.minimise_peak(max_seconds)
    solution = evaluate(kinds, program.policies(), started, False, together)
    if solution.peak > budget:
        proven = status == mip.OptimizationStatus.OPTIMAL
        raise InfeasibleBudget(budget, program.peak_bytes(), proven)
    return solution


class _Program:
    """The model over all kinds, with the peak as a variable: held under the budget, or itself to be minimised."""

    def __init__(self, kinds: Sequence[Kind], together: Together) -> None:
        self._kinds = kinds
        self._granule = _granule(kinds)
        self._model = _model()
        self._blocks = [BlockProgram(self._model, kind.profile) for kind in kinds]
        memories = [BlockMemory(block, self._granule) for block in self._blocks]
        self._held = self._total(memory.held() for memory in memories)
        self._peak = self._model.add_var()
        inner = [memory.inner() for memory in memories]
        for group in groups_of(kinds, together):
            held = mip.xsum(kinds[place].count * memories[place].held() for place in group)
            self._model += held <= self._peak
            for place in group:
                others = held - memories[place].held()
                for alive in inner[place]:
                    self._model += others + alive <= self._peak

    def minimise_peak(self, max_seconds: float) -> mip.OptimizationStatus:
        """Find policies of the smallest peak; NoSolutionInTime as in `_optimise`."""
        self._model.objective = mip.minimize(self._peak)
        return self._optimise(max_seconds)

    def minimise_seconds(self, budget: int, max_seconds: float) -> mip.OptimizationStatus:
        """Find policies of the least time, error and held bytes adding less than half a quantum to that."""
        # peaks are whole granules: half of one keeps an exact fit clear of CBC's tolerances
        self._peak.ub = budget // self._granule + 0.5
        quanta = self._total(_quanta(block) for block in self._blocks)
        error = self._total(_error(block) for block in self._blocks)
        self._model.objective = mip.minimize(quanta + _share(error, 0.45) + _share(self._held, 0.045))
        return self._optimise(max_seconds)

    def _optimise(self, max_seconds: float) -> mip.OptimizationStatus:
        """Run CBC for at most this long; NoSolutionInTime if that gives neither a solution nor a proof of none."""
        status = self._model.optimize(max_seconds=max_seconds)
        if status == mip.OptimizationStatus.NO_SOLUTION_FOUND:
            raise NoSolutionInTime(f"no policy was found in {max_seconds:.3g} seconds; allow more")
        if status not in _FOUND + _INFEASIBLE:
            raise RuntimeError(f"CBC ended with status {status.name}")
        return status

    def peak_bytes(self) -> int:
        """The peak found, as the model rounds it up."""
        return round(self._peak.x) * self._granule

    def policies(self) -> tuple[Policy, ...]:
        """The solution found, one policy per kind."""
        return tuple(block.policy() for block in self._blocks)

    def _total(self, expressions: Iterable[mip.LinExpr]) -> mip.LinExpr:
        """The sum over all calls of all kinds."""
        return mip.xsum(kind.count * expr for kind, expr in zip(self._kinds, expressions, strict=True))


def _model() -> mip.Model:
    """An empty model: silent, reproducible, with no gap allowed between the answer and the optimum."""
    model = mip.Model(solver_name=mip.CBC)
    model.verbose = 0
    model.threads = 1
    model.seed = 1
    model.max_mip_gap = 0.0
    model.max_mip_gap_abs = 1e-9
    # without an integer variable CBC prints, whatever `verbose` says
    model.add_var(var_type=mip.BINARY)
    return model


def _granule(kinds: Sequence[Kind]) -> int:
    """Bytes to a unit of the model: the greatest common divisor of all sizes, or what multiple `_LARGEST` asks for."""
    sizes = [size for kind in kinds for size in _sizes(kind.profile)]
    step = math.gcd(*sizes) or 1
    return step * max(1, math.ceil(max(sizes, default=0) / (step * _LARGEST)))


def _sizes(profile: Profile) -> Iterator[int]:
    yield from (value.nbytes for value in profile.graph.values)
    yield from (event.gradient_bytes for event in profile.graph.events)
    for offer in itertools.chain.from_iterable(profile.codecs):
        yield from (offer.nbytes, offer.workspace_bytes)


def _quanta(block: BlockProgram) -> mip.LinExpr:
    """What one call adds to the step, in quanta of time (paper, equation 4)."""
    replays = (_round(block.profile.op_seconds[op]) * block.runs(op) for op in block.schedule.times)
    codecs = (_round(offer.seconds) * chosen for _, offer, chosen in _compressions(block))
    return mip.xsum(itertools.chain(replays, codecs))


def _error(block: BlockProgram) -> mip.LinExpr:
    """Relative error times bytes, summed over the values that one call compresses."""
    values = block.profile.graph.values
    return mip.xsum(offer.error * values[value].nbytes * chosen for value, offer, chosen in _compressions(block))


def _compressions(block: BlockProgram) -> Iterator[tuple[int, CodecCost, mip.Var]]:
    for value in range(len(block.profile.graph.values)):
        for offer, chosen in block.compressions(value):
            yield value, offer, chosen


def _round(seconds: float) -> int:
    return round(seconds / _QUANTUM_SECONDS)


def _share(expression: mip.LinExpr, most: float) -> mip.LinExpr:
    """A sum over binaries, scaled so that it is at most `most`."""
    total = sum(expression.expr.values())
    return expression * (most / total) if total else expression
