"""What `ds_adacc plan` finds out, as plain data: the plan for a budget, and what other strategies would cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ds_adacc import planner
from ds_adacc.cli.answer import BadInput
from ds_adacc.cli.batch_size import BatchLine, Incomparable
from ds_adacc.cli.factory import Recorded
from ds_adacc.config import AdaccConfig
from ds_adacc.plan.budget import budget_bytes
from ds_adacc.plan.comparison import RULES, compare
from ds_adacc.plan.live_sets import Component, LiveSet
from ds_adacc.plan.plan import Group
from ds_adacc.plan.solve import with_advice

Stage = Callable[[str], None]  # told what is being done


@dataclass(frozen=True)
class Estimate:
    """The largest micro-batch by strategy (None: activations do not limit it), or why it cannot be estimated."""

    batches: tuple[int, int]
    largest: Mapping[str, int | None]
    refusal: str = ""


@dataclass(frozen=True)
class Planned:
    """The plan for a budget (bytes), or the refusal if no plan fits.

    `without` is the peak without checkpointing. `solve_seconds`: what the search for the plan took. `frontiers` and
    `policies` are by the block type's name; `policies` are those of the baselines, by the baseline's name, one for all
    of the block type's blocks.
    """

    recorded: Recorded
    budget: int
    without: int
    frontiers: Mapping[str, tuple[planner.Point, ...]]
    solution: planner.Solution | None
    refusal: planner.InfeasibleBudget | None
    solve_seconds: float
    baselines: Sequence[planner.Baseline]
    policies: Mapping[str, Mapping[str, planner.Policy]]
    estimate: Estimate

    @property
    def problem(self) -> planner.Problem:
        return self.recorded.problem


def plan(recorded: tuple[Recorded, Recorded], section: AdaccConfig, stage: Stage) -> Planned:
    """Plan for the first of the two micro-batch sizes. Raises BadInput if the solver finds no plan."""
    first, seconds = recorded[0], section.solver.max_seconds
    problem = first.problem
    without = planner.peak_without(problem)
    budget = budget_bytes(section.memory_budget, without, first.available)
    try:
        stage("finding the frontiers")
        find = partial(planner.in_process, planner.frontier, max_seconds=seconds)
        frontiers = {
            block_type.name: find(block_type.profile, max_gradient_error=problem.max_gradient_error)
            for block_type in problem.block_types
        }
        stage("planning")
        began = time.perf_counter()
        solution, refusal = _fit(lambda: Component(problem, (_names(problem),)).solve(budget, section))
        solve_seconds = time.perf_counter() - began
        stage("comparing")
        baselines, policies = _baselines(problem, budget, seconds)
        stage("estimating the largest micro-batch")
        estimate = _estimate(recorded, budget, seconds)
    except (planner.NoSolutionInTime, planner.NoAnswer) as error:
        raise BadInput(with_advice(str(error), section)) from error
    return Planned(first, budget, without, frontiers, solution, refusal, solve_seconds, baselines, policies, estimate)


def _fit(solve: Callable[[], planner.Solution]) -> tuple[planner.Solution | None, planner.InfeasibleBudget | None]:
    try:
        return solve(), None
    except planner.InfeasibleBudget as error:
        return None, error


def _names(problem: planner.Problem) -> LiveSet:
    return frozenset(block_type.name for block_type in problem.block_types)


def _baselines(
    problem: planner.Problem, budget: int, seconds: float
) -> tuple[list[planner.Baseline], dict[str, dict[str, planner.Policy]]]:
    """What each baseline would have cost, and its policies by block type; those of a search only if it fits."""
    retained = planner.everywhere(planner.no_checkpointing, problem)
    baselines = list(compare([Group(problem, (_names(problem),), retained)], budget))
    search = partial(planner.in_process, planner.solve_uniform, problem, budget, max_seconds=seconds)
    one, refusal = _fit(search)
    if one is not None:
        baselines.append(planner.Baseline("one policy", one.peak, one.added_seconds, True))
    elif refusal is not None:
        baselines.append(planner.Baseline("one policy", refusal.smallest, None, False))
    greedy = planner.greedy(problem, budget)
    found = {"one policy": one, "greedy": greedy if greedy.peak <= budget else None}
    policies = {}
    for place, block_type in enumerate(problem.block_types):
        fixed = {name: plan(block_type.profile) for name, plan in RULES.items()}
        policies[block_type.name] = fixed | {name: s.policies[place][0] for name, s in found.items() if s is not None}
    return baselines, policies


def _estimate(recorded: tuple[Recorded, Recorded], budget: int, seconds: float) -> Estimate:
    small, large = sorted(recorded, key=lambda one: one.batch)
    batches = small.batch, large.batch
    try:
        line = BatchLine((small.problem, large.problem), batches)
    except Incomparable as error:
        return Estimate(batches, {}, str(error))
    problem = line.at(large.batch)
    plans = {
        "smallest peak": planner.least_peak_in_process(problem, max_seconds=seconds).policies,
        "full checkpointing": planner.everywhere(planner.recompute_policy, problem).policies,
        "no checkpointing": planner.everywhere(planner.no_checkpointing, problem).policies,
    }
    return Estimate(batches, {name: line.largest(policies, budget) for name, policies in plans.items()})
