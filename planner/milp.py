"""What all searches share: the CBC model, its unit of bytes, and the loop that adds constraints as they are broken.

CBC works with tolerances, but a budget is exact. So the model counts bytes in granules, and so few of them that the
tolerances never add up to one. A granule is the greatest common divisor of all sizes, if that is coarse enough.
Otherwise sizes are rounded up to a coarser granule. This never breaks the budget, and wastes at most a 2^17th of the
largest size for each value held.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import mip

from ds_adacc.planner.graph import BlockGraph
from ds_adacc.planner.milp_choices import BlockVariables
from ds_adacc.planner.milp_memory import BlockMemory
from ds_adacc.planner.policy import Policy
from ds_adacc.planner.profile import BlockType, Profile
from ds_adacc.planner.simulate import simulate
from ds_adacc.planner.solution import NoSolutionInTime
from ds_adacc.planner.units import Bytes, DeductedBytes, combined, numbers

# granules in the largest size: fewer than the inverse of CBC's tolerance, which is 1e-6
_LARGEST = 2**17
_ROWS_AT_ONCE = 4
GAP = 5e-3  # of the time added, between the answer and the optimum: below what can be measured
_FOUND = (mip.OptimizationStatus.OPTIMAL, mip.OptimizationStatus.FEASIBLE)
_INFEASIBLE = (mip.OptimizationStatus.INFEASIBLE, mip.OptimizationStatus.INT_INFEASIBLE)


def empty_model(relative_gap: float = 0.0) -> mip.Model:
    """An empty model that prints nothing and gives the same answer each time.

    `relative_gap` is allowed between the answer and the optimum.
    """
    model = mip.Model(solver_name=mip.CBC)
    model.verbose = 0
    model.threads = 1
    model.seed = 1
    model.max_mip_gap = relative_gap
    model.max_mip_gap_abs = 1e-9
    # In these models, cutting planes and the feasibility pump cost more time than they save: without them most searches
    # take half as long.
    model.cuts, model.pump_passes = 0, 0
    # without an integer variable CBC prints even at verbose = 0
    model.add_var(var_type=mip.BINARY)
    return model


def granule_of(profiles: Sequence[Profile]) -> int:
    """Bytes in a granule: the greatest common divisor of all sizes, or the multiple of it that `_LARGEST` requires."""
    sizes = [size for profile in profiles for size in _sizes(profile)]
    step = math.gcd(*sizes) or 1
    return step * max(1, math.ceil(max(sizes, default=0) / (step * _LARGEST)))


def in_granules(profile: Profile, granule: int) -> Profile:
    """The profile with all sizes in granules, rounded up to whole ones. What is subtracted is rounded down."""
    by = {Bytes: lambda sizes: -(-sizes[0] // granule), DeductedBytes: lambda sizes: sizes[0] // granule}
    codecs = tuple(tuple(combined([offer], by) for offer in offers) for offers in profile.codecs)
    return replace(profile, graph=BlockGraph.combined([profile.graph], by), codecs=codecs)


def _sizes(profile: Profile) -> Iterator[int]:
    graph, offers = profile.graph, itertools.chain.from_iterable(profile.codecs)
    for part in (graph, *graph.values, *graph.ops, *graph.events, *offers):
        yield from numbers(part, Bytes, DeductedBytes)


class Tightens(Protocol):
    """A part of the model whose constraints are added when a solution breaks them."""

    def tighten(self) -> bool:
        """Add constraints that the model's present solution breaks; False if there are none."""


class BlockTypeModel:
    """One block type in the model. At every moment of its call: what is beside it + bytes alive in the call <= a limit.

    A constraint for each event of backward and each op of forward would be far too many, and few ever bind. So they are
    added only for moments at which a solution breaks the limit, until no solution does.
    """

    def __init__(self, model: mip.Model, block_type: BlockType, granule: int, max_gradient_error: float | None) -> None:
        self.variables = BlockVariables(model, in_granules(block_type.profile, granule), max_gradient_error)
        self.memory = BlockMemory(self.variables)
        self._beside: list[mip.LinExpr] = []  # in backward, and in forward, less the limit
        self._known: set[int] = set()  # the moments that have a constraint
        self._expressions: dict[int, mip.LinExpr] = {}

    def watch(self, others: mip.LinExpr, cached: mip.LinExpr, limit: mip.LinExpr) -> None:
        """Keep what is alive in the call below `limit`, with `others` beside it, and in forward with `cached` too."""
        self._beside = [others - limit, others + cached - limit]

    def expect(self, policy: Policy) -> None:
        """Add constraints for the moments at which this policy takes the most: the solution may be like it."""
        self._add(dict(enumerate(self._moments(policy))))

    def tighten(self) -> bool:
        """Add constraints for moments at which the model's present solution breaks a limit; False if there are none."""
        room = [0.5 - beside.x for beside in self._beside]
        moments = enumerate(self._moments(self.variables.policy()))
        over = {moment: alive for moment, alive in moments if alive > room[self._is_forward(moment)]}
        return self._add({moment: alive for moment, alive in over.items() if moment not in self._known})

    def _add(self, amounts: Mapping[int, float]) -> bool:
        """Add constraints for the moments of the largest amounts; False if there are none."""
        worst = sorted(amounts, key=amounts.__getitem__, reverse=True)[:_ROWS_AT_ONCE]
        for moment in worst:
            self._known.add(moment)
            self.variables.model += self._beside[self._is_forward(moment)] + self._at(moment) <= 0
        return bool(worst)

    def _moments(self, policy: Policy) -> tuple[int, ...]:
        """The bytes alive at each event of backward, then at each op of forward."""
        run = simulate(self.variables.profile, policy)
        return *run.timeline, *run.forward

    def _is_forward(self, moment: int) -> bool:
        return moment >= len(self.variables.profile.graph.events)

    def _at(self, moment: int) -> mip.LinExpr:
        if moment not in self._expressions:
            op = moment - len(self.variables.profile.graph.events)
            is_forward = self._is_forward(moment)
            self._expressions[moment] = self.memory.in_forward(op) if is_forward else self.memory.at(moment)
        return self._expressions[moment]


def optimise(model: mip.Model, watched: Sequence[Tightens], max_seconds: float) -> bool | None:
    """Search for at most `max_seconds`; the solution is then in the model.

    Returns True if it is the optimum, False if it is the best found in time, None if there is no solution. Raises
    NoSolutionInTime if the search ended without a solution that keeps all limits, and without proof that there is none.
    """
    deadline = time.perf_counter() + max_seconds
    while True:
        left = max(deadline - time.perf_counter(), 1e-9)
        status = model.optimize(max_seconds=left)
        if status in _INFEASIBLE:
            return None
        if status == mip.OptimizationStatus.NO_SOLUTION_FOUND:
            raise NoSolutionInTime(f"the solver found no policy in {max_seconds:.3g} seconds")
        if status not in _FOUND:
            raise RuntimeError(f"CBC ended with status {status.name}")
        if not sum(block.tighten() for block in watched):
            return status == mip.OptimizationStatus.OPTIMAL


def found(optimal: bool | None) -> bool:
    """What `optimise` returned for a model that always has a solution: whether it is the optimum.

    Raises NoSolutionInTime if CBC has called the model infeasible, which is wrong.
    """
    if optimal is None:
        raise NoSolutionInTime("the solver found no policy, though there is one")
    return optimal


def ties(error: mip.LinExpr, held: mip.LinExpr, most: float = 1.0) -> mip.LinExpr:
    """What decides among equally quick policies: the smaller error, and then fewer bytes held.

    Together they count less than half a quantum of time, times `most`.
    """
    return _share(error, 0.45 * most) + _share(held, 0.045 * most)


def at_most(budget: int, granule: int) -> float:
    """The bound of a peak in granules: with half a granule to spare, CBC's tolerances do not exclude an exact fit."""
    return budget // granule + 0.5


def _share(expression: mip.LinExpr, most: float) -> mip.LinExpr:
    """A sum over binaries, scaled so that it is at most `most`."""
    total = sum(expression.expr.values())
    return expression * (most / total) if total else expression
