"""The planner of a policy for each block.

Different policies per block use budget that a single policy for all blocks of a type would waste. A block may take any
point of its block type's frontier, or the policy that `solve_uniform` found.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from ds_adacc.planner.baselines import retain_policy
from ds_adacc.planner.frontier import Point, frontier
from ds_adacc.planner.per_block_model import PerBlockModel
from ds_adacc.planner.problem import Problem
from ds_adacc.planner.solution import (
    InfeasibleBudget,
    NoSolutionInTime,
    Solution,
    check_request,
    evaluate_per_block,
    evaluate_uniform,
)
from ds_adacc.planner.solve_uniform import least_peak, solve_uniform
from ds_adacc.planner.without_solver import without_solver


def solve_per_block(problem: Problem, budget: int, *, max_seconds: float) -> Solution:
    """A policy for each block, which together add the least time with a peak of at most `budget` bytes.

    Never slower than `solve_uniform`, whose policies are among the choices. When `max_seconds` run out, the best
    policies found by then are returned, those of `without_solver` if the search found none. Raises InfeasibleBudget if
    no policies fit, which is never concluded from a search that was cut short; NoSolutionInTime if none were found, and
    whether there are any is not known; ValueError for a bad argument.
    """
    check_request(budget, max_seconds)
    started = time.perf_counter()
    plain = evaluate_uniform(problem, [retain_policy(block_type.profile) for block_type in problem.block_types])
    if plain.added_seconds == 0 and plain.peak <= budget:
        return replace(plain, solve_seconds=time.perf_counter() - started, proven_optimal=True)
    solution = _search(problem, budget, started + max_seconds, max_seconds)
    return replace(solution, solve_seconds=time.perf_counter() - started)


def _search(problem: Problem, budget: int, deadline: float, max_seconds: float) -> Solution:
    try:
        single: Solution | InfeasibleBudget = solve_uniform(problem, budget, max_seconds=max_seconds)
    except InfeasibleBudget as error:
        single = error
    except NoSolutionInTime as error:
        return without_solver(problem, budget, str(error))
    try:
        return _better(problem, budget, single, deadline)
    except NoSolutionInTime as error:
        if isinstance(single, InfeasibleBudget):
            return _by_rules(problem, budget, single, str(error))
        # it may be proven that no single policy is better, but not that no policies per block are
        return replace(single, proven_optimal=False)


def _by_rules(problem: Problem, budget: int, single: InfeasibleBudget, why: str) -> Solution:
    """As `without_solver`, where the search for a single policy has already found a budget that would do."""
    try:
        return without_solver(problem, budget, why)
    except InfeasibleBudget as refusal:
        smallest = min(refusal.smallest, single.smallest)
        raise InfeasibleBudget(budget, smallest, proven=refusal.proven) from None


def _better(problem: Problem, budget: int, single: Solution | InfeasibleBudget, deadline: float) -> Solution:
    """The best policies per block, or `single` if none are better.

    Raises InfeasibleBudget if no policies fit, NoSolutionInTime if the search was cut short.
    """
    if not (problem.order or any(block_type.blocks > 1 for block_type in problem.block_types)):
        return _or_raise(single)
    if not problem.order and isinstance(single, InfeasibleBudget):
        # In an unknown order the peak is what all calls hold, and the largest transient. Where each block takes that
        # policy of its block type which holds the least, neither grows: if any policies fit, one for all does.
        raise single
    # the searches share the time that is left
    left = _left(deadline)
    guess = single if isinstance(single, Solution) else least_peak(problem, left / 4)
    frontiers, are_whole = _frontiers(problem, left / 2)
    model = _model(problem, frontiers, guess)
    left = _left(deadline)
    optimal = model.minimise_seconds(budget, left, fallback=guess is single)
    if optimal is None and isinstance(single, Solution):
        return single
    if optimal is None and not (are_whole and guess.proven_optimal):
        raise NoSolutionInTime("the solver's time was over before it had compared policies per block")
    if optimal is None:
        raise _refusal(problem, frontiers, guess, single, left)
    per_block = replace(evaluate_per_block(problem, model.policies()), proven_optimal=optimal)
    if per_block.peak > budget:
        raise RuntimeError(f"the policies take {per_block.peak} bytes of a budget of {budget}: a bug in the planner")
    if isinstance(single, InfeasibleBudget):
        return per_block
    best = min(single, per_block, key=lambda solution: (solution.added_seconds, solution.error))
    return replace(best, proven_optimal=optimal)


def _left(deadline: float) -> float:
    left = deadline - time.perf_counter()
    if left <= 0:
        raise NoSolutionInTime("the solver's time was over before it had compared policies per block")
    return left


def _frontiers(problem: Problem, seconds: float) -> tuple[list[tuple[Point, ...]], bool]:
    """The frontier of each block type, and whether none was cut short."""
    bound, share, found, are_whole = problem.max_gradient_error, seconds / len(problem.block_types), [], True
    for block_type in problem.block_types:
        began = time.perf_counter()
        found.append(frontier(block_type.profile, max_seconds=share, max_gradient_error=bound))
        are_whole = are_whole and time.perf_counter() - began < share
    return found, are_whole


def _model(problem: Problem, points: Sequence[Sequence[Point]], guess: Solution) -> PerBlockModel:
    """The model in which blocks take one of these points or the guess; each policy is offered once."""
    choices = []
    for block_type, of_type, policies in zip(problem.block_types, points, guess.policies, strict=True):
        offered = (*of_type, Point.of(block_type.profile, policies[0]))
        choices.append(list({point.policy: point for point in offered}.values()))
    model = PerBlockModel(problem, choices)
    model.expect([policies[0] for policies in guess.policies])
    return model


def _refusal(
    problem: Problem,
    frontiers: Sequence[Sequence[Point]],
    least: Solution,
    refusal: InfeasibleBudget,
    max_seconds: float,
) -> InfeasibleBudget:
    """The refusal, with the smallest peak of a policy per block if that is less than of one policy for all.

    Only the points that hold the least are on offer. Which other points there are depends on measured seconds, and the
    budget that is named must do when all is measured again.
    """
    model = _model(problem, [of_type[-1:] for of_type in frontiers], least)
    try:
        model.minimise_peak(max_seconds)
    except NoSolutionInTime:
        return refusal
    smallest = model.peak_bytes()
    return refusal if refusal.smallest <= smallest else InfeasibleBudget(refusal.budget, smallest, proven=False)


def _or_raise(single: Solution | InfeasibleBudget) -> Solution:
    if isinstance(single, InfeasibleBudget):
        raise single
    return single
