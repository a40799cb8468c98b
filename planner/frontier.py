"""The frontier of one block: the policies that no other beats in both the bytes held and the time added."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import mip

from ds_adacc.planner.error_estimate import gradient_error
from ds_adacc.planner.milp import empty_model, granule_of, in_granules, optimise, ties
from ds_adacc.planner.milp_choices import BlockVariables, Expr
from ds_adacc.planner.milp_memory import BlockMemory
from ds_adacc.planner.policy import Policy
from ds_adacc.planner.profile import Profile
from ds_adacc.planner.simulate import Simulation, simulate
from ds_adacc.planner.solution import NoSolutionInTime, check_request, quantization_error

_MOST_POINTS = 64
_COARSE = 8  # points between which the others are looked for: a frontier that is cut short still spans the whole range


@dataclass(frozen=True)
class Point:
    """A policy, and what the simulator says of one call with it.

    `error` is the sum over the compressed values of relative error times bytes, `gradient_error` the estimated relative
    error of the block's gradient.
    """

    policy: Policy
    simulation: Simulation
    error: float
    gradient_error: float

    @classmethod
    def of(cls, profile: Profile, policy: Policy) -> Point:
        """The point of a policy for this profile."""
        simulation = simulate(profile, policy)
        return cls(policy, simulation, quantization_error(profile, policy), gradient_error(profile, policy))


def frontier(profile: Profile, *, max_seconds: float, max_gradient_error: float | None = None) -> tuple[Point, ...]:
    """The exact frontier, from the fastest point to the one that holds the least.

    Each point is the optimum of a mixed-integer program that may hold one byte less than the point before (one granule,
    see `milp`). If that could give more than about 64 points, it must hold less by a 64th of the whole range. What
    backward needs beyond the bytes held is not bounded. When `max_seconds` run out, the points found by then are
    returned, which are spread over the range. Raises NoSolutionInTime if there are none, ValueError for a bad argument.
    """
    check_request(0, max_seconds)
    deadline = time.perf_counter() + max_seconds
    points: list[Point] = []
    with contextlib.suppress(NoSolutionInTime):  # part of a frontier is of use
        for policy in _Search(profile, max_gradient_error).policies(deadline):
            points.append(Point.of(profile, policy))
    if not points:
        raise NoSolutionInTime(f"the solver found no point of the frontier in {max_seconds:.3g} seconds")
    return tuple(sorted(points, key=lambda point: point.simulation.held, reverse=True))


class _Search:
    """The program of one block, in which only the bytes held are bounded."""

    def __init__(self, profile: Profile, max_gradient_error: float | None) -> None:
        self._model = empty_model()
        self._program = BlockVariables(self._model, in_granules(profile, granule_of([profile])), max_gradient_error)
        self._held = self._model.add_var()
        held = BlockMemory(self._program).held()
        self._model += self._held == held
        self._objective = self._program.quanta() + ties(self._program.error(), held)

    def policies(self, deadline: float) -> Iterator[Policy]:
        """The frontier's policies, each once: the fastest, the leanest, a few between them, and then all others.

        Raises NoSolutionInTime after the deadline, a reading of `time.perf_counter()`.
        """
        least = self._minimise(self._held, deadline)
        most = self._minimise(self._objective, deadline)
        yield self._program.policy()
        if most == least:
            return
        self._within(least, deadline)
        yield self._program.policy()
        # A gap lies between what a known policy holds and a limit below it, down to which the best policy is known.
        gaps = [(most, least)]
        for count in (_COARSE, _MOST_POINTS):
            step, left = math.ceil((most - least) / count), []
            for above, known in gaps:
                while (limit := above - step) > known:
                    held = self._within(limit, deadline)
                    left.append((above, limit))
                    if held <= known:  # the best within this limit is the one known: nothing is left below it
                        break
                    yield self._program.policy()
                    above = held
                else:
                    left.append((above, known))
            gaps = left

    def _within(self, limit: int, deadline: float) -> int:
        """The best policy that holds at most so many granules; returns what it holds."""
        self._held.ub = limit + 0.5
        return self._minimise(self._objective, deadline)

    def _minimise(self, objective: Expr, deadline: float) -> int:
        """Search, and return what the policy found holds, in granules."""
        self._model.objective = mip.minimize(objective)
        optimise(self._model, [], deadline - time.perf_counter())
        return round(self._held.x)
