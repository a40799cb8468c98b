"""The frontier of one block: the policies that no other beats in both the bytes held and the time added.

Many blocks of one type mix their policies. A mix comes close to any point of the line between two, so the corners of
the frontier are most of what matters, and they are quick to find. Few blocks cannot mix so finely: for them the
frontier is searched point by point.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mip

from ds_adacc.planner.error_estimate import gradient_error
from ds_adacc.planner.milp import empty_model, found, granule_of, in_granules, optimise, ties
from ds_adacc.planner.milp_choices import BlockVariables, Expr
from ds_adacc.planner.milp_memory import BlockMemory
from ds_adacc.planner.policy import Policy
from ds_adacc.planner.profile import Profile
from ds_adacc.planner.simulate import Simulation, simulate
from ds_adacc.planner.solution import NoSolutionInTime, check_request, quantization_error

_FEW = 4  # blocks; more of them mix policies
# Parts of the range. No stretch wider than the last of them is left without a search. The first ones are coarser, so
# that a frontier that is cut short still spans the whole range.
_FOR_FEW, _FOR_MANY = (8, 64), (16,)
_NARROWEST = 64  # part of the range: between corners that are closer, no other is looked for
_ON_THE_LINE = 0.5  # quanta of time below a line that still count as on it


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


def frontier(
    profile: Profile,
    *,
    max_seconds: float,
    blocks: int = 1,
    max_gradient_error: float | None = None,
    with_cached: bool = False,
) -> tuple[Point, ...]:
    """Points of the exact frontier that so many blocks need, from the fastest to the one that holds the least.

    For up to four blocks, each point is the optimum among policies that hold at least one granule (see `milp`) less
    than the point before. If that could give more than about 64 points, it must hold less by a 64th of the whole range.
    For more blocks, the points are the corners, and between them others a 16th apart. What backward needs beyond the
    bytes held is not bounded. `with_cached`: what caches hold besides (`Value.cached`) counts as held, as it does for
    the peak of forward. When `max_seconds` run out, the points found by then are returned, which are spread over
    the range. Raises NoSolutionInTime if there are none, ValueError for a bad argument.
    """
    check_request(0, max_seconds)
    deadline = time.perf_counter() + max_seconds
    points: list[Point] = []
    with contextlib.suppress(NoSolutionInTime):  # part of a frontier is of use
        for policy in _FrontierModel(profile, max_gradient_error, with_cached).policies(blocks, deadline):
            points.append(Point.of(profile, policy))
    if not points:
        raise NoSolutionInTime(f"the solver found no point of the frontier in {max_seconds:.3g} seconds")
    return tuple(sorted(points, key=lambda point: _held(point.simulation, with_cached), reverse=True))


def _held(run: Simulation, with_cached: bool) -> int:
    return run.held + run.cached if with_cached else run.held


class _Corner(NamedTuple):
    """What a policy holds, in granules, and the value of the objective: quanta of time, and what decides ties."""

    held: int
    value: float


class _FrontierModel:
    """The integer program of one block, in which only the bytes held are bounded."""

    def __init__(self, profile: Profile, max_gradient_error: float | None, with_cached: bool) -> None:
        self._model = empty_model()
        self._variables = BlockVariables(self._model, in_granules(profile, granule_of([profile])), max_gradient_error)
        self._held = self._model.add_var()
        memory = BlockMemory(self._variables)
        held = memory.held() + memory.cached() if with_cached else memory.held()
        self._model += self._held == held
        self._objective = self._variables.quanta() + ties(self._variables.error(), held)

    def policies(self, blocks: int, deadline: float) -> Iterator[Policy]:
        """The policies of the points, each once: the fastest, the leanest, and then all others.

        Raises NoSolutionInTime after the deadline, a reading of `time.perf_counter()`.
        """
        least = self._minimise(self._held, deadline)
        most = self._minimise(self._objective, deadline)
        fastest = _Corner(most, self._objective.x)
        yield self._variables.policy()
        if most == least:
            return
        self._within(least, deadline)
        leanest = _Corner(least, self._objective.x)
        yield self._variables.policy()
        known, mixes = [most, least], blocks > _FEW
        if mixes:
            for held in self._corners(fastest, leanest, deadline):
                yield self._variables.policy()
                known.append(held)
        steps = [math.ceil((most - least) / parts) for parts in (_FOR_MANY if mixes else _FOR_FEW)]
        yield from self._between(sorted(known, reverse=True), steps, deadline)

    def _corners(self, fastest: _Corner, leanest: _Corner, deadline: float) -> Iterator[int]:
        """What the corners between two hold; the policy of each is in the model when it comes.

        Between two corners, whatever lies furthest below the line through them is a corner too (Aneja and Nair,
        "Bicriteria transportation problem", 1979). If nothing lies below it, the stretch has no other corner. These
        searches have no limit on the bytes, which makes them several times as quick as those that have one.
        """
        self._held.ub = mip.INF
        narrow = max((fastest.held - leanest.held) // _NARROWEST, 1)
        stretches = collections.deque([(fastest, leanest)])
        while stretches:
            above, below = stretches.popleft()
            if above.held - below.held <= narrow:
                continue
            price = (below.value - above.value) / (above.held - below.held)  # of a granule, along the line
            found = _Corner(self._minimise(self._objective + price * self._held, deadline), self._objective.x)
            if below.held < found.held < above.held:
                yield found.held
                if found.value < above.value + price * (above.held - found.held) - _ON_THE_LINE:
                    stretches += [(above, found), (found, below)]

    def _between(self, known: Sequence[int], steps: Sequence[int], deadline: float) -> Iterator[Policy]:
        """Policies between those that hold `known` granules, each with fewer by a step than the one before.

        One step after the other is tried, from the coarsest.
        """
        # A gap lies between what a known policy holds and a limit below it, down to which the best policy is known.
        gaps = list(itertools.pairwise(known))
        for step in steps:
            left = []
            for above, best in gaps:
                while (limit := above - step) > best:
                    held = self._within(limit, deadline)
                    left.append((above, limit))
                    if held <= best:  # the best within this limit is the one known: nothing is left below it
                        break
                    yield self._variables.policy()
                    above = held
                else:
                    left.append((above, best))
            gaps = left

    def _within(self, limit: int, deadline: float) -> int:
        """The best policy that holds at most so many granules; returns what it holds."""
        self._held.ub = limit + 0.5
        return self._minimise(self._objective, deadline)

    def _minimise(self, objective: Expr, deadline: float) -> int:
        """Search, and return what the policy found holds, in granules."""
        self._model.objective = mip.minimize(objective)
        found(optimise(self._model, [], deadline - time.perf_counter()))  # the leanest policy always fits
        return round(self._held.x)
