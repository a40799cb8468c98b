"""The policies one would write by hand, with the solver's signature: what the planner has to beat."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ds_adacc.planner.graph import BlockGraph
from ds_adacc.planner.policy import Policy
from ds_adacc.planner.profile import RETAIN, Kind, Profile
from ds_adacc.planner.solution import InfeasibleBudget, Solution, check_budget, check_request, evaluate
from ds_adacc.planner.together import Together


def retain_all(kinds: Sequence[Kind], budget: int, *, max_seconds: float, together: Together = None) -> Solution:
    """Keep every saved value ("Baseline" in the paper, section 4.1); replay only for what cannot be stored.

    Raises InfeasibleBudget, with its own peak, if that exceeds `budget` bytes; ValueError for a bad argument.
    """
    return _apply(retain_policy, kinds, budget, max_seconds, together)


def recompute_all(kinds: Sequence[Kind], budget: int, *, max_seconds: float, together: Together = None) -> Solution:
    """Keep block inputs and what cannot be rebuilt, replay the rest ("Megatron-LM" in the paper).

    Raises InfeasibleBudget, with its own peak, if that exceeds `budget` bytes; ValueError for a bad argument.
    """
    return _apply(recompute_policy, kinds, budget, max_seconds, together)


def compress_all(kinds: Sequence[Kind], budget: int, *, max_seconds: float, together: Together = None) -> Solution:
    """Compress each saved value with the first codec on offer, keep the rest ("Quantization" in the paper).

    Raises InfeasibleBudget, with its own peak, if that exceeds `budget` bytes; ValueError for a bad argument.
    """
    return _apply(compress_policy, kinds, budget, max_seconds, together)


def _apply(
    plan: Callable[[Profile], Policy], kinds: Sequence[Kind], budget: int, max_seconds: float, together: Together
) -> Solution:
    check_request(kinds, max_seconds)
    check_budget(budget)
    started = time.perf_counter()
    policies = [plan(kind.profile) for kind in kinds]
    solution = evaluate(kinds, policies, started, proven_optimal=False, together=together)
    if solution.peak > budget:
        raise InfeasibleBudget(budget, solution.peak)
    return solution


def retain_policy(profile: Profile) -> Policy:
    """Keep every saved value that can be stored."""
    return _cover(profile.graph, [RETAIN if value.storable else None for value in profile.graph.values])


def recompute_policy(profile: Profile) -> Policy:
    """Keep block inputs and what cannot be rebuilt, replay the rest."""
    rebuildable = profile.graph.rebuildable_ops
    values = profile.graph.values
    return _cover(profile.graph, [None if value.producer in rebuildable else RETAIN for value in values])


def compress_policy(profile: Profile) -> Policy:
    """Compress each saved value with the first codec on offer, keep the rest."""
    stores: list[str | None] = []
    for value, offers in zip(profile.graph.values, profile.codecs, strict=True):
        first = offers[0].codec if offers else RETAIN
        stores.append(first if value.storable else None)
    return _cover(profile.graph, stores)


def _cover(graph: BlockGraph, wanted: Sequence[str | None]) -> Policy:
    """Follow backward's requests: store a value as `wanted`, or else replay its producer."""
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
