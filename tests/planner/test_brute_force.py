"""The MILP against brute force: every policy of small random blocks, with the simulator as the judge."""

import itertools
import math

import mip
import pytest
from blocks import check_gradient_errors, smallest_budget
from hypothesis import given
from hypothesis import strategies as st
from random_blocks import (
    ERROR_BOUNDS,
    LARGE,
    SMALL,
    examples,
    microseconds,
    points,
    problems,
    profiles,
    undominated,
)

from ds_adacc.planner import InfeasibleBudget, peak_bytes, simulate, solve_uniform
from ds_adacc.planner.milp import empty_model, optimise
from ds_adacc.planner.milp_choices import BlockVariables
from ds_adacc.planner.milp_memory import BlockMemory


def outcomes(profile, max_gradient_error):
    """The undominated outcomes over all feasible policies of one block type.

    An outcome: microseconds, bytes held, transient, fetched, cached, and alive in forward beyond those held and cached.
    """
    runs = (point.simulation for point in points(profile, max_gradient_error))
    return undominated(
        (microseconds(run.seconds), run.held, run.transient, run.fetched, run.cached, beyond(run)) for run in runs
    )


def beyond(run):
    return max(run.forward, default=0) - run.held - run.cached


def all_outcomes(problem):
    """(peak, added microseconds) of every combination."""
    choices = [outcomes(block_type.profile, problem.max_gradient_error) for block_type in problem.block_types]
    for combination in itertools.product(*choices):
        counts = [block_type.count for block_type in problem.block_types]
        held = sum(count * run[1] for count, run in zip(counts, combination, strict=True))
        cached = sum(count * run[4] for count, run in zip(counts, combination, strict=True))
        transient, fetched, forward = (max(run[part] for run in combination) for part in (2, 3, 5))
        seconds = sum(count * run[0] for count, run in zip(counts, combination, strict=True))
        yield held + max(transient, cached + forward) + fetched, seconds


def check(problem, slack):
    """`slack`: bytes that the model may lose to rounding; none if the sizes have a common divisor that is not small."""

    def quickest(budget):
        return min((seconds for peak, seconds in reachable if peak <= budget), default=math.inf)

    reachable = sorted(all_outcomes(problem))
    smallest, largest = reachable[0][0], reachable[-1][0]
    found = smallest_budget(problem)
    assert smallest <= found <= smallest + slack
    for budget in (found, (2 * smallest + largest) // 3, (smallest + 2 * largest) // 3):
        if budget >= found:
            solution = solve_uniform(problem, budget, max_seconds=60)
            assert solution.peak <= budget
            assert solution.peak == peak_bytes(problem, solution.policies)
            assert quickest(budget) <= microseconds(solution.added_seconds) <= quickest(budget - slack)
            assert solution.proven_optimal or slack
            assert all(len(set(chosen)) == 1 for chosen in solution.policies)
            check_gradient_errors(problem, solution)
    if smallest > 0:
        with pytest.raises(InfeasibleBudget, match=f"is {found} bytes") as caught:
            solve_uniform(problem, smallest - 1, max_seconds=60)
        assert (caught.value.budget, caught.value.smallest) == (smallest - 1, found)


def counted(profile, policy, time):
    """The bytes at an event of backward as the program counts them. None if it leaves the policy out, as no use."""
    model = empty_model()
    variables, nbytes = BlockVariables(model, profile, None), model.add_var()
    stored = {(value, store) for value, store in enumerate(policy.stores) if store is not None}
    if not stored <= variables.choices.keys():
        return None
    for choice, chosen in variables.choices.items():
        model += chosen == (choice in stored)
    model += nbytes >= BlockMemory(variables).at(time)
    model.objective = mip.minimize(nbytes)
    return round(nbytes.x, 6) if optimise(model, (), 60) else None


@examples(50)
@given(profile=profiles(SMALL, ops=4), random=st.randoms())
def test_the_program_counts_the_bytes_that_the_simulator_counts(profile, random):
    every = [point.policy for point in points(profile)]
    for policy in random.sample(every, min(3, len(every))):
        for time, alive in enumerate(simulate(profile, policy).timeline):
            assert counted(profile, policy, time) in (alive, None)


@examples(40)
@given(problem=problems(SMALL))
def test_optimum_equals_brute_force(problem):
    check(problem, slack=0)


@examples(20)
@given(problem=problems(SMALL, bounds=ERROR_BOUNDS))
def test_optimum_equals_brute_force_under_a_bound_on_the_gradient_error(problem):
    check(problem, slack=0)


@examples(20)
@given(problem=problems(LARGE))
def test_optimum_equals_brute_force_at_awkward_sizes(problem):
    # two block types, three calls each, a dozen sizes, a 2^17th of 12 GB
    check(problem, slack=2 * 3 * 12 * 12 * 10**9 // 2**17)
