"""Policies that one would write by hand: what the solver has to beat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ds_adacc.planner.graph import BlockGraph
from ds_adacc.planner.peak import Simulations, peak_bytes
from ds_adacc.planner.policy import Policy
from ds_adacc.planner.problem import Problem
from ds_adacc.planner.profile import OFFLOAD, RETAIN, Profile
from ds_adacc.planner.solution import Solution, evaluate_uniform


@dataclass(frozen=True)
class Baseline:
    """What a simpler planner would have cost: peak bytes, and seconds added to a forward and backward.

    `added_seconds` is None if the planner found no policies within the budget, and `peak` the smallest that it can do.
    """

    name: str
    peak: int
    added_seconds: float | None
    fits: bool


def everywhere(rule: Callable[[Profile], Policy], problem: Problem) -> Solution:
    """The solution in which every block has the policy that `rule` makes of its profile, whatever its peak."""
    return evaluate_uniform(problem, [rule(block_type.profile) for block_type in problem.block_types])


def no_checkpointing(profile: Profile) -> Policy:
    """Keep every saved value that can be stored ("Baseline" in the paper, section 4.1)."""
    return retain_policy(profile).lending(profile, lends=False)


def retain_policy(profile: Profile) -> Policy:
    """As `no_checkpointing`, and keep what other blocks may need too (`Value.lent`)."""
    return cover(profile.graph, [RETAIN if value.storable else None for value in profile.graph.values])


def free_of_cost(problem: Problem, budget: int) -> Solution | None:
    """The solution without checkpointing, if that fits and adds no time: no search finds a better one."""
    plain = everywhere(no_checkpointing, problem)
    return replace(plain, proven_optimal=True) if plain.added_seconds == 0 and plain.peak <= budget else None


def peak_without(problem: Problem, known: Simulations | None = None) -> int:
    """Peak bytes without checkpointing. `known`: as in `simulations`."""
    return peak_bytes(problem, [(no_checkpointing(each.profile),) * each.blocks for each in problem.block_types], known)


def recompute_policy(profile: Profile) -> Policy:
    """Keep block inputs and what cannot be rebuilt, replay the rest ("Megatron-LM" in the paper)."""
    rebuildable = profile.graph.rebuildable_ops
    values = profile.graph.values
    return cover(profile.graph, [None if value.producer in rebuildable else RETAIN for value in values])


def compress_policy(profile: Profile) -> Policy:
    """Compress each saved value with the first codec on offer, keep the rest ("Quantization" in the paper).

    It ignores a bound on the gradient error.
    """
    stores: list[str | None] = []
    for value, offers in zip(profile.graph.values, profile.codecs, strict=True):
        first = next((offer.codec for offer in offers if offer.codec != OFFLOAD), RETAIN)
        stores.append(first if value.storable else None)
    return cover(profile.graph, stores)


def cover(graph: BlockGraph, wanted: Sequence[str | None]) -> Policy:
    """The policy that stores what backward needs as `wanted` says, and rebuilds it where that is None."""
    needed = {*graph.saved, *(value for op in graph.replayed(wanted) for value in graph.ops[op].inputs)}
    return Policy(tuple(store if value in needed else None for value, store in enumerate(wanted)))
