"""What `ds_adacc plan` finds out, as plain data: the plan for a budget, and what other strategies would cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ds_adacc import planner
from ds_adacc.cli.answer import BadInput
from ds_adacc.cli.batch_size import BatchLine, Incomparable
from ds_adacc.cli.factory import Recorded
from ds_adacc.config import AdaccConfig
from ds_adacc.plan.budget import budget_bytes
from ds_adacc.plan.comparison import compare, peak_when
from ds_adacc.plan.plan import Baseline, Group

Stage = Callable[[str], None]  # told what is being done


_FIXED = {
    "retain all": planner.retain_policy,
    "recompute all": planner.recompute_policy,
    "compress all": planner.compress_policy,
}


@dataclass(frozen=True)
class Estimate:
    """The largest micro-batch by strategy (None: activations do not limit it), or why it cannot be estimated."""

    batches: tuple[int, int]
    largest: Mapping[str, int | None]
    refusal: str = ""


@dataclass(frozen=True)
class Planned:
    """The plan for a budget (bytes), or the refusal if no plan fits.

    `without` is the peak without checkpointing. `frontiers` and `policies` are by the block type's name; `policies` are
    those of the baselines, by the baseline's name, one for all of the block type's blocks.
    """

    recorded: Recorded
    budget: int
    without: int
    frontiers: Mapping[str, tuple[planner.Point, ...]]
    solution: planner.Solution | None
    refusal: planner.InfeasibleBudget | None
    baselines: Sequence[Baseline]
    policies: Mapping[str, Mapping[str, planner.Policy]]
    estimate: Estimate

    @property
    def problem(self) -> planner.Problem:
        return self.recorded.problem


def plan(recorded: tuple[Recorded, Recorded], section: AdaccConfig, stage: Stage) -> Planned:
    """Plan for the first of the two micro-batch sizes. Raises BadInput if the section's time is too short."""
    first, seconds = recorded[0], section.solver.max_seconds
    problem = first.problem
    without = peak_when(planner.retain_policy, problem)
    budget = budget_bytes(section.memory_budget, without, first.available)
    try:
        stage("finding the frontiers")
        frontiers = {block_type.name: _frontier(problem, block_type, seconds) for block_type in problem.block_types}
        stage("planning")
        solver = planner.compress_all if section.forces_compression else planner.solve_in_process
        solution, refusal = _fit(solver, problem, budget, seconds)
        stage("comparing")
        baselines, policies = _baselines(problem, budget, seconds)
        stage("estimating the largest micro-batch")
        estimate = _estimate(recorded, budget, seconds)
    except (planner.NoSolutionInTime, planner.NoAnswer) as error:
        raise BadInput(f"adacc.solver.max_seconds = {seconds!r} is not enough: {error}") from error
    return Planned(first, budget, without, frontiers, solution, refusal, baselines, policies, estimate)


def _frontier(problem: planner.Problem, block_type: planner.BlockType, seconds: float) -> tuple[planner.Point, ...]:
    bound = problem.max_gradient_error
    return planner.in_process(planner.frontier, block_type.profile, max_seconds=seconds, max_gradient_error=bound)


def _fit(
    solver: Callable[..., planner.Solution], problem: planner.Problem, budget: int, seconds: float
) -> tuple[planner.Solution | None, planner.InfeasibleBudget | None]:
    try:
        return solver(problem, budget, max_seconds=seconds), None
    except planner.InfeasibleBudget as error:
        return None, error


def _baselines(
    problem: planner.Problem, budget: int, seconds: float
) -> tuple[list[Baseline], dict[str, dict[str, planner.Policy]]]:
    """What each baseline would have cost, and its policies by block type; those of a search only if it fits."""
    live_sets = (frozenset(block_type.name for block_type in problem.block_types),)
    retained = planner.evaluate_uniform(problem, [planner.retain_policy(k.profile) for k in problem.block_types])
    baselines = list(compare([Group(problem, live_sets, retained)], budget))
    one, refusal = _fit(partial(planner.in_process, planner.solve_uniform), problem, budget, seconds)
    if one is not None:
        baselines.append(Baseline("one policy", one.peak, one.added_seconds, True))
    elif refusal is not None:
        baselines.append(Baseline("one policy", refusal.smallest, None, False))
    found = {"one policy": one, "greedy": _fit(planner.greedy, problem, budget, seconds)[0]}
    policies = {}
    for place, block_type in enumerate(problem.block_types):
        fixed = {name: plan(block_type.profile) for name, plan in _FIXED.items()}
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
        "full checkpointing": _everywhere(planner.recompute_policy, problem),
        "no checkpointing": _everywhere(planner.retain_policy, problem),
    }
    return Estimate(batches, {name: line.largest(policies, budget) for name, policies in plans.items()})


def _everywhere(plan: Callable[[planner.Profile], planner.Policy], problem: planner.Problem) -> planner.Policies:
    return [[plan(block_type.profile)] * block_type.blocks for block_type in problem.block_types]
