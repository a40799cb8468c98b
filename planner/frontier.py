"""The frontier of one block: policies that no other beats in both the bytes held and the time added.

Blocks of one type mix their policies. So the policies that matter are the corners of the frontier, between which a mix
of many blocks lies on a line. Few blocks cannot mix so finely, so wide stretches between corners get points as well.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
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

_WIDE = 16  # stretches of more than this part of the range get points between corners
_NARROW = 64  # stretches of less than this part of the range are not searched for corners
_QUANTUM = 0.5  # of time, on the way to the next: what is below a line by less is on it


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
    """Points of the exact frontier, from the fastest one to the one that holds the least.

    They are the corners, but for those less than a 64th of the whole range from others, and between corners more than
    a 16th apart further points, a 16th apart at least. What backward needs beyond the bytes held is not bounded.
    When `max_seconds` run out, the points found by then are returned, which are spread over the range. Raises
    NoSolutionInTime if there are none, ValueError for a bad argument.
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


# what a policy holds, in granules, and the value of the objective: the quanta of time added, and what decides ties
_Place = tuple[int, float]


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
        """The policies of the points, each once: the fastest, the leanest, the corners, and those on wide stretches.

        Raises NoSolutionInTime after the deadline, a reading of `time.perf_counter()`.
        """
        least = self._minimise(self._held, deadline)
        most = self._minimise(self._objective, deadline)
        fastest = (most, self._objective.x)
        yield self._program.policy()
        if most == least:
            return
        self._within(least, deadline)
        leanest = (least, self._objective.x)
        yield self._program.policy()
        corners = [fastest, leanest]
        for corner in self._corners(fastest, leanest, deadline):
            yield self._program.policy()
            corners.append(corner)
        step = math.ceil((most - least) / _WIDE)
        for above, below in itertools.pairwise(sorted((held for held, _ in corners), reverse=True)):
            limit = above - step
            # If the best within the limit is the next corner, nothing is left above that.
            while limit > below and (held := self._within(limit, deadline)) > below:
                yield self._program.policy()
                limit = held - step

    def _corners(self, fastest: _Place, leanest: _Place, deadline: float) -> Iterator[_Place]:
        """The corners between two; the policy of each is in the model when it comes.

        Between two corners, whatever lies furthest below the line through them is a corner too (Aneja and Nair,
        "Bicriteria transportation problem", 1979). If nothing lies below it, there is none. These searches have no
        limit on the bytes, which makes them several times as quick as those that have one.
        """
        self._held.ub = mip.INF
        narrow = max(1, (fastest[0] - leanest[0]) // _NARROW)
        stretches = collections.deque([(fastest, leanest)])
        while stretches:
            above, below = stretches.popleft()
            if above[0] - below[0] <= narrow:
                continue
            price = (below[1] - above[1]) / (above[0] - below[0])  # of a granule, on the line through both
            held = self._minimise(self._objective + price * self._held, deadline)
            corner = (held, self._objective.x)
            if below[0] < held < above[0] and corner[1] < above[1] + price * (above[0] - held) - _QUANTUM:
                yield corner
                stretches += [(above, corner), (corner, below)]

    def _within(self, limit: int, deadline: float) -> int:
        """The best policy that holds at most so many granules; returns what it holds."""
        self._held.ub = limit + 0.5
        return self._minimise(self._objective, deadline)

    def _minimise(self, objective: Expr, deadline: float) -> int:
        """Search, and return what the policy found holds, in granules."""
        self._model.objective = mip.minimize(objective)
        optimise(self._model, [], deadline - time.perf_counter())
        return round(self._held.x)
