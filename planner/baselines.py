"""Policies that one would write by hand, and planners that apply them: what the solver has to beat."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ds_adacc.planner.graph import BlockGraph
from ds_adacc.planner.policy import Policy
from ds_adacc.planner.problem import Problem
from ds_adacc.planner.profile import OFFLOAD, RETAIN, Profile
from ds_adacc.planner.solution import InfeasibleBudget, Solution, check_request, evaluate_uniform


def retain_all(problem: Problem, budget: int, *, max_seconds: float) -> Solution:
    """Keep every saved value ("Baseline" in the paper, section 4.1); replay only for what cannot be stored.

    Raises InfeasibleBudget, with its own peak, if that exceeds `budget` bytes; ValueError for a bad argument.
    """
    return _apply(retain_policy, problem, budget, max_seconds)


def recompute_all(problem: Problem, budget: int, *, max_seconds: float) -> Solution:
    """Keep block inputs and what cannot be rebuilt, replay the rest ("Megatron-LM" in the paper).

    Raises InfeasibleBudget, with its own peak, if that exceeds `budget` bytes; ValueError for a bad argument.
    """
    return _apply(recompute_policy, problem, budget, max_seconds)


def compress_all(problem: Problem, budget: int, *, max_seconds: float) -> Solution:
    """Compress each saved value with the first codec on offer, keep the rest ("Quantization" in the paper).

    It ignores a bound on the gradient error. Raises InfeasibleBudget, with its own peak, if that exceeds `budget`
    bytes; ValueError for a bad argument.
    """
    return _apply(compress_policy, problem, budget, max_seconds)


def _apply(plan: Callable[[Profile], Policy], problem: Problem, budget: int, max_seconds: float) -> Solution:
    check_request(budget, max_seconds)
    started = time.perf_counter()
    policies = [plan(block_type.profile) for block_type in problem.block_types]
    solution = evaluate_uniform(problem, policies)
    if solution.peak > budget:
        raise InfeasibleBudget(budget, solution.peak)
    return replace(solution, solve_seconds=time.perf_counter() - started)


def retain_policy(profile: Profile) -> Policy:
    """Keep every saved value that can be stored."""
    return cover(profile.graph, [RETAIN if value.storable else None for value in profile.graph.values])


def recompute_policy(profile: Profile) -> Policy:
    """Keep block inputs and what cannot be rebuilt, replay the rest."""
    rebuildable = profile.graph.rebuildable_ops
    values = profile.graph.values
    return cover(profile.graph, [None if value.producer in rebuildable else RETAIN for value in values])


def compress_policy(profile: Profile) -> Policy:
    """Compress each saved value with the first codec on offer, keep the rest."""
    stores: list[str | None] = []
    for value, offers in zip(profile.graph.values, profile.codecs, strict=True):
        first = next((offer.codec for offer in offers if offer.codec != OFFLOAD), RETAIN)
        stores.append(first if value.storable else None)
    return cover(profile.graph, stores)


def cover(graph: BlockGraph, wanted: Sequence[str | None]) -> Policy:
    """The policy that stores what backward needs as `wanted` says, and replays the producer where that is None."""
    stores: list[str | None] = [None] * len(graph.values)
    replays: set[int] = set()
    pending = list(graph.saved)
    while pending:
        value = pending.pop()
        stores[value] = wanted[value]
        producer = graph.values[value].producer
        if wanted[value] is None and producer is not None and producer not in replays:
            replays.add(producer)
            pending.extend(graph.ops[producer].inputs)
    return Policy(tuple(stores), tuple(sorted(replays)))
