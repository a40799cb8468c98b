"""Policies without the integer program, for when the solver gives no answer: it is out of time, or its process ended.

Whether a run goes on must not depend on how busy the machine is. So these rules count no seconds: the same problem has
the same answer. Policies that keep the budget (and the bound on the gradient error) are used if one of the rules finds
any. The budget is called infeasible only if a bound proves it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ds_adacc.planner.baselines import cover, everywhere, recompute_policy, retain_policy
from ds_adacc.planner.error_estimate import gradient_error
from ds_adacc.planner.greedy import greedy
from ds_adacc.planner.least_bytes import least_held, least_peak_bound
from ds_adacc.planner.peak import Simulations
from ds_adacc.planner.policy import Policy
from ds_adacc.planner.problem import Problem
from ds_adacc.planner.profile import RETAIN, BlockType, Profile
from ds_adacc.planner.solution import InfeasibleBudget, NoSolutionInTime, Solution, evaluate_uniform, human_bytes

_MOST_TRIES = 2000  # policies that the descent tries: a number of tries, not of seconds


def without_solver(problem: Problem, budget: int, why: str) -> Solution:
    """The quickest policies that a simple rule finds within `budget` bytes. `why` says why the solver found none.

    Raises InfeasibleBudget if no policies can fit, and NoSolutionInTime if that is not known.
    """
    candidates = _candidates(problem)
    fitting = [solution for solution in (*candidates, greedy(problem, budget)) if solution.peak <= budget]
    if not fitting:
        fitting = [_descend(problem, candidates, budget)]
        _check(problem, budget, fitting[0].peak, why)
    return replace(min(fitting, key=lambda solution: (solution.added_seconds, solution.error)), fallback=why)


def leanest(problem: Problem) -> Solution:
    """The policies of the smallest peak that simple rules find."""
    return _descend(problem, _candidates(problem), 0)


def _check(problem: Problem, budget: int, smallest: int, why: str) -> None:
    """Raise what `without_solver` raises if the smallest peak that the rules reach is above the budget."""
    if smallest <= budget:
        return
    bound = least_peak_bound(problem)
    if bound > budget:
        raise InfeasibleBudget(budget, smallest, proven=bound == smallest)
    raise NoSolutionInTime(
        f"{why}. Simple rules find no plan within {human_bytes(budget)} either: the smallest peak that they reach is "
        f"{human_bytes(smallest)}"
    )


def _candidates(problem: Problem) -> list[Solution]:
    """Solutions of one policy for each block type, all within the bound on the gradient error."""
    lean = functools.partial(_lean, bound=problem.max_gradient_error)
    return [everywhere(rule, problem) for rule in (retain_policy, recompute_policy, lean)]


def _lean(profile: Profile, bound: float | None) -> Policy:
    """Hold the fewest bytes, with lossy codecs only if they keep the bound together."""
    policy = _holding(profile, least_held(profile, bound)[1])
    if bound is None or gradient_error(profile, policy) <= bound:
        return policy
    # A lossy codec without an error of its own would not do: an op that reads its value may still be stale.
    lossless = tuple(tuple(offer for offer in offers if offer.lossless) for offers in profile.codecs)
    return _holding(profile, least_held(replace(profile, codecs=lossless))[1])


def _holding(profile: Profile, stores: dict[int, str]) -> Policy:
    return cover(profile.graph, [stores.get(value) for value in range(len(profile.graph.values))])


def _descend(problem: Problem, candidates: Sequence[Solution], enough: int) -> Solution:
    """From the candidate of the smallest peak on, change how single values are stored as long as that lowers the peak.

    It ends when the peak is at most `enough` bytes.
    """
    solution = min(candidates, key=lambda candidate: candidate.peak)
    tries, improved = _MOST_TRIES, True
    known: Simulations = {}  # a try changes the policy of one block type only
    while improved and solution.peak > enough:
        improved = False
        for place, block_type in enumerate(problem.block_types):
            for value in range(len(block_type.profile.graph.values)):
                for policy in _variants(block_type, solution.policies[place][0], value, problem.max_gradient_error):
                    if tries == 0 or solution.peak <= enough:
                        return solution
                    tries -= 1
                    policies = [of_type[0] for of_type in solution.policies]
                    policies[place] = policy
                    other = evaluate_uniform(problem, policies, known)
                    if other.peak < solution.peak:
                        solution, improved = other, True
    return solution


def _variants(block_type: BlockType, policy: Policy, value: int, bound: float | None) -> Iterator[Policy]:
    """The policy with this value stored in each other way, within the bound on the gradient error."""
    profile, graph = block_type.profile, block_type.profile.graph
    if not graph.values[value].storable:
        return
    # what the policy does not need yet is replayed if it can be, once the change needs it
    wanted = [
        store or (None if graph.values[v].producer in graph.rebuildable_ops else RETAIN)
        for v, store in enumerate(policy.stores)
    ]
    options: list[str | None] = [RETAIN, *(offer.codec for offer in profile.offers_within(value, bound))]
    if graph.values[value].producer in graph.rebuildable_ops:
        options.append(None)
    for store in options:
        other = cover(graph, [*wanted[:value], store, *wanted[value + 1 :]])
        if other != policy and (bound is None or gradient_error(profile, other) <= bound):
            yield other
