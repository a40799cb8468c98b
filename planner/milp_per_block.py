"""The integer program of a policy for each block: how many blocks in a row take which point of the frontier.

If backward is known to take the blocks in reverse, it frees what later blocks held before it comes to earlier ones. The
peak then falls at the last block in forward order, so the program chooses for each of this block's values, not only
among points. Among blocks of one block type in a row, those with the larger transients come first in forward order: if
two neighbours are in the other order, to swap them does not raise the peak of backward. Where caches hold much, another
order may have a lower peak in forward, which is not looked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import mip

from ds_adacc.planner.frontier import Point
from ds_adacc.planner.milp import (
    GAP,
    BlockTypeModel,
    at_most,
    empty_model,
    found,
    granule_of,
    in_granules,
    optimise,
    ties,
)
from ds_adacc.planner.milp_choices import in_quanta
from ds_adacc.planner.policy import Policy
from ds_adacc.planner.problem import Problem
from ds_adacc.planner.profile import BlockType, Profile
from ds_adacc.planner.simulate import Simulation, simulate

# nodes of a reproducible search: later ones hardly ever find a better solution, but may be millions
_NODES = 100


@dataclass
class _Choice:
    """A point of the frontier that blocks of a row may take.

    `run` is its simulation in granules, `blocks` how many take it, `taken` whether any does (made when first needed).
    """

    point: Point
    run: Simulation
    blocks: mip.Var
    taken: mip.Var | None = None


class _Row:
    """Blocks of one block type in a row, and the points that they may take, larger transients first."""

    def __init__(
        self, model: mip.Model, block_type: BlockType, scaled: Profile, points: Sequence[Point], blocks: int
    ) -> None:
        self.block_type = block_type
        self._model = model
        self._blocks = blocks
        runs = [(point, simulate(scaled, point.policy)) for point in points]
        runs.sort(key=lambda pair: pair[1].transient, reverse=True)
        self.choices = [
            _Choice(point, run, model.add_var(var_type=mip.INTEGER, ub=self._blocks)) for point, run in runs
        ]
        model += mip.xsum(choice.blocks for choice in self.choices) == blocks

    def held(self, upto: int | None = None) -> mip.LinExpr:
        """What the calls hold that take one of the first `upto` choices; of all choices if None."""
        calls = self.block_type.calls_per_block
        return mip.xsum(calls * choice.run.held * choice.blocks for choice in self.choices[:upto])

    def cached(self, upto: int | None = None) -> mip.LinExpr:
        """What caches hold of the blocks that take one of the first `upto` choices (`Simulation.cached`)."""
        return mip.xsum(c.run.cached * c.blocks for c in self.choices[:upto] if c.run.cached)

    def error(self) -> mip.LinExpr:
        return mip.xsum(self.block_type.calls_per_block * c.point.error * c.blocks for c in self.choices)

    def quanta(self) -> mip.LinExpr:
        """What the calls add to the step, in quanta of 0.1 microseconds."""
        calls = self.block_type.calls_per_block
        return mip.xsum(calls * in_quanta(choice.run.seconds) * choice.blocks for choice in self.choices)

    def policies(self) -> list[Policy]:
        """The policy of each block, in forward order."""
        return [choice.point.policy for choice in self.choices for _ in range(round(choice.blocks.x))]

    def largest(self, size_of: Callable[[Simulation], int]) -> mip.LinExpr:
        """The largest such size of the choices taken: the smallest on offer, and each step up that a block needs."""
        choices = sorted(self.choices, key=lambda choice: size_of(choice.run), reverse=True)
        sizes = [size_of(choice.run) for choice in choices]
        parts: list[mip.LinExpr | int] = [sizes[-1]]
        for upto, (size, smaller) in enumerate(itertools.pairwise(sizes), 1):
            if size > smaller:
                needed = self._model.add_var(var_type=mip.BINARY)
                self._model += mip.xsum(choice.blocks for choice in choices[:upto]) <= self._blocks * needed
                parts.append((size - smaller) * needed)
        return mip.xsum(parts)

    def taken(self, choice: _Choice) -> mip.Var:
        """Whether any block takes the choice."""
        if choice.taken is None:
            choice.taken = self._model.add_var(var_type=mip.BINARY)
            self._model += choice.blocks <= self._blocks * choice.taken
        return choice.taken


def _without_carried(block_type: BlockType) -> BlockType:
    """The block type of the last block in forward order, whose backward is the first."""
    graph = replace(block_type.profile.graph, carried_bytes=0)
    return replace(block_type, profile=replace(block_type.profile, graph=graph))


@dataclass
class _Limit:
    """A constraint of a block that takes this choice: `beside` and what it `needs` besides are below the peak."""

    row: _Row
    choice: _Choice
    beside: mip.LinExpr
    needs: int


class PerBlockModel:
    """The model over all blocks; `points` are those on offer, by block type.

    In a known order there would be a constraint for the transient of each choice. `tighten` adds only those that a
    solution breaks.
    """

    def __init__(self, problem: Problem, points: Sequence[Sequence[Point]]) -> None:
        self._problem = problem
        self._granule = granule_of([block_type.profile for block_type in problem.block_types])
        self._model = empty_model(GAP)
        self._peak = self._model.add_var()
        self._fetch = self._model.add_var()
        self._places, self._rows, self._last = [], [], []
        scaled = [in_granules(block_type.profile, self._granule) for block_type in problem.block_types]
        layout = problem.rows or [(place, block_type.blocks) for place, block_type in enumerate(problem.block_types)]
        for number, (place, blocks) in enumerate(layout):
            detailed = bool(problem.order) and number == len(layout) - 1
            row = _Row(self._model, problem.block_types[place], scaled[place], points[place], blocks - detailed)
            self._places.append(place)
            self._rows.append(row)
            if detailed:
                last = _without_carried(problem.block_types[place])
                self._last.append(BlockTypeModel(self._model, last, self._granule, problem.max_gradient_error))
        self._bound_peak()

    def expect(self, policies: Sequence[Policy]) -> None:
        """Add at once the constraints that these policies, one for each block type, come closest to breaking."""
        for block in self._last:
            block.expect(policies[self._places[-1]])

    def minimise_seconds(self, budget: int, max_seconds: float, is_reproducible: bool) -> bool | None:
        """Find the policies of the least time; returns what `optimise` does.

        Error and held bytes break ties. A reproducible search ends after a fixed number of nodes, so that it gives the
        same policies each time. It is for a caller that has others, if it finds none.
        """
        if is_reproducible:
            self._model.max_nodes = _NODES
        self._peak.ub = at_most(budget, self._granule)
        most = max(block_type.blocks for block_type in self._problem.block_types)
        quanta = mip.xsum([row.quanta() for row in self._rows] + [block.variables.quanta() for block in self._last])
        error = mip.xsum([row.error() for row in self._rows] + [block.variables.error() for block in self._last])
        self._model.objective = mip.minimize(quanta + ties(error, self._held(), 1 / most))
        return optimise(self._model, [self, *self._last], max_seconds)

    def minimise_peak(self, max_seconds: float) -> bool:
        """Find the policies of the smallest peak; returns what `found` does."""
        self._model.objective = mip.minimize(self._peak)
        return found(optimise(self._model, [self, *self._last], max_seconds))

    def peak_bytes(self) -> int:
        """The peak found in bytes, with the model's rounding up."""
        return round(self._peak.x) * self._granule

    def policies(self) -> list[list[Policy]]:
        """Per block type, the policy of each block in forward order."""
        chosen: list[list[Policy]] = [[] for _ in self._problem.block_types]
        for place, row in zip(self._places, self._rows, strict=True):
            chosen[place] += row.policies()
        for block in self._last:
            chosen[self._places[-1]].append(block.variables.policy())
        return chosen

    def _held(self) -> mip.LinExpr:
        return mip.xsum([row.held() for row in self._rows] + [block.memory.held() for block in self._last])

    def tighten(self) -> bool:
        """Add constraints for the choices whose transient breaks the limit in the solution; False if there are none."""
        room = self._peak.x - self._fetch.x + 0.5
        broken = [each for each in self._limits if each.choice.blocks.x > 0.5 and each.beside.x + each.needs > room]
        for limit in broken:
            needed = limit.needs * limit.row.taken(limit.choice)
            self._model += limit.beside + needed + self._fetch <= self._peak
        self._limits = [limit for limit in self._limits if all(limit is not other for other in broken)]
        return bool(broken)

    def _bound_peak(self) -> None:
        """Keep what is alive during every block's call below the peak; `_limits` wait until `tighten` needs them."""
        self._reserve_fetch()
        cached = mip.xsum(row.cached() for row in self._rows)
        for block in self._last:
            others = mip.xsum(row.held() for row in self._rows)
            block.watch(others + self._fetch, cached, mip.xsum([self._peak]))
        if self._problem.order:
            self._limits = list(self._in_order())
            return
        self._limits = []
        for row in self._rows:
            alive = self._held() + self._fetch
            self._model += alive + row.largest(lambda call: call.transient) <= self._peak
            if cached.expr:
                self._model += alive + cached + row.largest(lambda call: call.forward_transient) <= self._peak

    def _in_order(self) -> Iterator[_Limit]:
        self._model += self._held() + self._fetch <= self._peak
        for number, row in enumerate(self._rows):
            held = mip.xsum(earlier.held() for earlier in self._rows[:number])
            cached = mip.xsum(earlier.cached() for earlier in self._rows[:number])
            for place, choice in enumerate(row.choices, 1):
                left = held + row.held(place)
                yield _Limit(row, choice, left, choice.run.transient)
                kept = cached + row.cached(place)
                if kept.expr:
                    yield _Limit(row, choice, left + kept, choice.run.forward_transient)

    def _reserve_fetch(self) -> None:
        """Reserve room for what comes back from the host while another block's backward runs."""
        for row in self._rows:
            for choice in row.choices:
                if choice.run.fetched:
                    self._model += self._fetch >= choice.run.fetched * row.taken(choice)
        for block in self._last:
            self._model += self._fetch >= block.variables.host_bytes()
