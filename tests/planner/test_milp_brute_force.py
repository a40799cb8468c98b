"""The MILP against brute force: every policy of small random blocks, with the simulator as the judge."""

import itertools
import math

import pytest
from ds_adacc.planner import (
    RETAIN,
    BlockGraph,
    CodecCost,
    Event,
    InfeasibleBudget,
    Kind,
    Op,
    Policy,
    Profile,
    Value,
    peak_bytes,
    simulate,
    smallest_peak,
    solve,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MICROSECOND = 1e-6
THOROUGH = settings(
    max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@st.composite
def graphs(draw, sizes):
    """Up to five ops with one or two outputs each, some not replayable, values some not storable; up to four events."""
    values = [("input", None, True)]
    ops = []
    for index in range(draw(st.integers(1, 5))):
        inputs = draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=2))
        outputs = tuple(range(len(values), len(values) + draw(st.sampled_from([1, 1, 2]))))
        values += [(f"v{output}", index, draw(st.sampled_from([True, True, False]))) for output in outputs]
        ops.append(Op(f"op{index}", tuple(inputs), outputs, draw(st.sampled_from([True, True, True, False]))))
    values = tuple(Value(name, "any", draw(sizes), producer, storable) for name, producer, storable in values)
    usable = BlockGraph(values, tuple(ops), ()).rebuildable_ops
    needed = [index for index, value in enumerate(values) if value.storable or value.producer in usable]
    events = draw(st.lists(st.lists(st.sampled_from(needed), unique=True, max_size=3), min_size=1, max_size=4))
    return BlockGraph(
        values,
        tuple(ops),
        tuple(Event(f"e{time}", tuple(event), draw(sizes)) for time, event in enumerate(events)),
    )


@st.composite
def profiles(draw, sizes):
    graph = draw(graphs(sizes))
    times = st.integers(0, 9).map(lambda count: count * MICROSECOND)
    offers = []
    budget = 4
    for value in graph.values:
        count = draw(st.integers(0, min(2, budget))) if value.storable else 0
        budget -= count
        offers.append(
            tuple(
                CodecCost(f"c{i}", draw(sizes) // 2, draw(times), draw(times), i / 4, draw(sizes)) for i in range(count)
            )
        )
    return Profile(graph, tuple(draw(times) for _ in graph.ops), tuple(offers))


def kinds(sizes):
    def name(pairs):
        return [Kind(f"k{i}", profile, count) for i, (profile, count) in enumerate(pairs)]

    return st.lists(st.tuples(profiles(sizes), st.integers(1, 3)), min_size=1, max_size=2).map(name)


SMALL = st.integers(0, 12)
# no common divisor, gigabytes: what CBC's tolerances cannot tell apart
LARGE = st.integers(0, 12).flatmap(lambda k: st.sampled_from([k * 10**9, k * 10**9 + 7]))


def outcomes(profile):
    """The undominated (seconds, held, transient) over all feasible policies of one kind."""
    graph = profile.graph
    stores = [
        (None, RETAIN, *(offer.codec for offer in offers)) if value.storable else (None,)
        for value, offers in zip(graph.values, profile.codecs, strict=True)
    ]
    replayable = [index for index, op in enumerate(graph.ops) if op.replayable]
    results = set()
    for chosen in itertools.product(*stores):
        for size in range(len(replayable) + 1):
            for replays in itertools.combinations(replayable, size):
                try:
                    run = simulate(profile, Policy(chosen, replays))
                except ValueError:
                    continue
                results.add((round(run.seconds / MICROSECOND), run.held, run.inner_peak - run.held))
    return [r for r in results if not any(o != r and all(a <= b for a, b in zip(o, r, strict=True)) for o in results)]


def all_outcomes(kinds, together):
    """(peak, added microseconds) of every combination."""
    for combination in itertools.product(*(outcomes(kind.profile) for kind in kinds)):
        runs = {kind.name: (kind.count, *run) for kind, run in zip(kinds, combination, strict=True)}
        peaks = []
        for names in together or [runs]:
            held = sum(runs[name][0] * runs[name][2] for name in names)
            peaks.append(held + max(0, max(runs[name][3] for name in names)))
        yield max(peaks), sum(count * seconds for count, seconds, _, _ in runs.values())


def check(kinds, slack, together=None):
    """`slack`: bytes that the model may lose to rounding; none if the sizes have a common divisor that is not small."""

    def quickest(budget):
        return min((seconds for peak, seconds in reachable if peak <= budget), default=math.inf)

    reachable = sorted(all_outcomes(kinds, together))
    smallest, largest = reachable[0][0], reachable[-1][0]
    found = smallest_peak(kinds, 60, together)
    assert smallest <= found <= smallest + slack
    for budget in (found, (2 * smallest + largest) // 3, (smallest + 2 * largest) // 3):
        if budget >= found:
            solution = solve(kinds, budget, max_seconds=60, together=together)
            assert solution.peak <= budget
            assert solution.peak == peak_bytes(kinds, solution.policies, together)
            microseconds = round(solution.added_seconds / MICROSECOND, 3)
            assert quickest(budget) <= microseconds <= quickest(budget - slack)
            assert solution.proven_optimal or slack
    if smallest > 0:
        with pytest.raises(InfeasibleBudget, match=f"is {found} bytes") as caught:
            solve(kinds, smallest - 1, max_seconds=60, together=together)
        assert (caught.value.budget, caught.value.smallest) == (smallest - 1, found)


@THOROUGH
@given(kinds=kinds(SMALL))
def test_optimum_equals_brute_force(kinds):
    check(kinds, slack=0)


@st.composite
def gatherings(draw):
    """Two kinds, and which of them are alive together: never, or now and then."""
    one, other = (Kind(name, draw(profiles(SMALL)), draw(st.integers(1, 3))) for name in "ab")
    return [one, other], draw(st.sampled_from([["a", "b"], ["b", "ab"], ["a", "b", "ab"]]))


@THOROUGH
@given(gathering=gatherings())
def test_optimum_equals_brute_force_where_not_all_are_alive_together(gathering):
    kinds, together = gathering
    check(kinds, slack=0, together=together)


@THOROUGH
@given(kinds=kinds(LARGE))
def test_optimum_equals_brute_force_at_awkward_sizes(kinds):
    # two kinds, three calls each, a dozen sizes, a 2^17th of 12 GB
    check(kinds, slack=2 * 3 * 12 * 12 * 10**9 // 2**17)
