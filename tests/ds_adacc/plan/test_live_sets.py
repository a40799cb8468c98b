"""Component live sets, against every choice of policies for small random block types."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_blocks import SMALL, examples, points, profiles, undominated

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.plan.comparison import compare
from ds_adacc.plan.live_sets import Component
from ds_adacc.plan.plan import PlanRequest
from ds_adacc.plan.solve import solve
from ds_adacc.planner.solve_uniform import least_peak

CONFIG = load({"adacc": {"codecs": "none", "solver": {"max_seconds": 60.0}}})
AB, AC = frozenset("ab"), frozenset("ac")


@pytest.fixture(scope="module", autouse=True)
def in_this_process():
    """A process for each search would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "solve_in_process", planner.solve_per_block)
        patch.setattr(planner, "least_peak_in_process", least_peak)
        yield


@st.composite
def requests(draw):
    """Block type a beside b at one time, beside c at another."""
    drawn = {name: (draw(profiles(SMALL, ops=3)), draw(st.integers(1, 3))) for name in "abc"}
    return PlanRequest({name: planner.BlockType(name, *of_type) for name, of_type in drawn.items()}, (AB, AC))


def beyond(run):
    """What forward needs beyond what it leaves behind."""
    return max(run.forward, default=0) - run.held - run.cached


def smallest_possible(request):
    """The least that the larger of the two peaks can be."""
    runs = {
        name: undominated(
            (run.held * block_type.count, run.transient, run.fetched, run.cached * block_type.count, beyond(run))
            for run in (point.simulation for point in points(block_type.profile))
        )
        for name, block_type in request.block_types.items()
    }

    def peak(*chosen):
        held, transients, fetched, cached, forward = zip(*chosen, strict=True)
        return sum(held) + max(*transients, sum(cached) + max(forward)) + max(fetched)

    # b and c never meet: for each choice of a, each takes what is best beside it
    return min(max(min(peak(a, other) for other in runs[name]) for name in "bc") for a in runs["a"])


def retained_peak(request):
    """The larger peak when everything is retained."""
    policies = [
        (planner.retain_policy(block_type.profile),) * block_type.blocks for block_type in request.block_types.values()
    ]
    return Component(request.problem("abc"), (AB, AC)).peak_of(policies)


def solved(request, budget):
    (group,) = solve(request, budget, CONFIG, {}, ())
    return group


@examples(12)
@given(request=requests())
def test_the_budget_is_kept_in_every_live_set_and_a_refusal_names_one_that_can_be(request):
    smallest, full = smallest_possible(request), retained_peak(request)
    for budget in sorted({smallest - 1, smallest, (smallest + full) // 2, full}):
        if budget < 0:
            continue
        try:
            group = solved(request, budget)
        except planner.InfeasibleBudget as error:
            assert error.budget == budget < error.smallest
            assert smallest <= error.smallest
            group, budget = solved(request, error.smallest), error.smallest
        else:
            assert budget >= smallest
        assert group.unfit(budget) == []
        check(group)


def check(group):
    """The peak, the held bytes and the seconds are those of the policies, which can be carried out."""
    chosen = dict(zip("abc", group.solution.policies, strict=True))
    each = []
    for names in group.live_sets:
        members = tuple(block_type for block_type in group.block_types if block_type.name in names)
        each.append((planner.Problem(members), [chosen[block_type.name] for block_type in members]))
    assert group.solution.peak == max(planner.peak_bytes(*one) for one in each)
    assert group.held == max(sum(planner.held_bytes(*one)) for one in each)
    assert group.added_seconds == max(planner.added_seconds(*one) for one in each)


def block_type(name, sizes, *events, count=1, workspace=0, packed=None):
    """Values of these sizes that are all saved, used by these events (value, gradient bytes); the first one packs."""
    values = tuple(planner.Value(f"x{number}", "", nbytes, None, True) for number, nbytes in enumerate(sizes))
    steps = tuple(planner.Event(f"e{number}", (number,), nbytes) for number, nbytes in events)
    offer = () if packed is None else (planner.CodecCost("packed", packed, 1e-6, 0.0, 0.0, workspace, lossless=True),)
    profile = planner.Profile(planner.BlockGraph(values, (), steps), (), (offer, *((),) * (len(sizes) - 1)))
    return planner.BlockType(name, profile, count)


def request_of(*block_types):
    return PlanRequest({each.name: each for each in block_types}, (AB, AC))


def test_a_shared_block_type_takes_the_stricter_policy():
    """Each call of a holds 8 bytes, or packed 2 and then needs 8 in backward; c leaves room for one whole call of four.

    Beside b all of them fit whole.
    """
    a = block_type("a", [8], (0, 0), count=4, packed=2)
    b, c = block_type("b", [4], (0, 0)), block_type("c", [20], (0, 0))
    assert planner.solve_per_block(planner.Problem((a, b)), 42, max_seconds=60).added_seconds == 0
    group = solved(request_of(a, b, c), 42)
    of_a, *_ = group.solution.policies
    assert [policy.stores for policy in of_a].count(("packed",)) == 3
    assert group.solution.peak == 3 * 2 + 8 + 20 + 8
    assert not group.solution.proven_optimal


def test_a_live_set_that_fits_with_the_policies_of_others_is_not_solved(monkeypatch):
    """A translator's lengths of source and target pair in many ways."""
    names = [*"abcd"]
    types = {name: block_type(name, [8 + number], (0, 0), packed=2) for number, name in enumerate(names)}
    pairs = [frozenset(pair) for pair in ("ac", "ad", "bc", "bd")]
    searched = []

    def counted(problem, budget, *, max_seconds):
        searched.append((*sorted(each.name for each in problem.block_types), max_seconds))
        return planner.solve_per_block(problem, budget, max_seconds=max_seconds)

    monkeypatch.setattr(planner, "solve_in_process", counted)
    (group,) = solve(PlanRequest(types, pairs), 16, CONFIG, {}, ())
    assert group.solution.peak <= 16 and not group.unfit(16)
    assert searched == [("b", "d", 15.0), ("a", "d", 15.0), ("b", "c", 15.0)]


def test_where_the_stricter_policy_breaks_the_budget_all_take_the_smallest_peak(monkeypatch):
    """a holds 30 bytes, or packed 2 and then needs 40 in backward: 2 + 30 + 40 beside b, 30 + 30 if left whole."""
    a = block_type("a", [30], (0, 0), workspace=10, packed=2)
    b, c = block_type("b", [30], (0, 0)), block_type("c", [20], (0, 0))

    def pack_beside_c(problem, budget, *, max_seconds):
        has_c = "c" in {each.name for each in problem.block_types}
        return planner.everywhere(planner.compress_policy if has_c else planner.retain_policy, problem)

    monkeypatch.setattr(planner, "solve_in_process", pack_beside_c)
    assert solved(request_of(a, b, c), 72).solution.peak == 72
    group = solved(request_of(a, b, c), 71)
    assert (group.solution.peak, group.added_seconds) == (60, 0)
    with pytest.raises(planner.InfeasibleBudget, match=r"the smallest found .* is 60 bytes"):
        solved(request_of(a, b, c), 59)


def test_compressing_everything_names_a_budget_that_both_live_sets_fit():
    config = load({"adacc": {"codecs": "quantization", "memory_budget": "1GiB"}})
    assert config.forces_compression
    request = request_of(
        *(block_type(name, [size], (0, 0), packed=2) for name, size in zip("abc", (8, 9, 20), strict=True))
    )
    with pytest.raises(planner.InfeasibleBudget) as caught:
        solve(request, 1, config, {}, ())
    assert caught.value.smallest == 2 + 2 + 20
    (group,) = solve(request, caught.value.smallest, config, {}, ())
    assert {policy.stores for chosen in group.solution.policies for policy in chosen} == {("packed",)}


def test_baselines_are_of_the_live_set_that_takes_the_most():
    request = request_of(*(block_type(name, [size], (0, 0)) for name, size in zip("abc", (8, 9, 20), strict=True)))
    baselines = {each.name: each for each in compare([solved(request, 40)], 28)}
    assert (baselines["retain all"].peak, baselines["retain all"].fits) == (28, True)
    assert not compare([solved(request, 40)], 27)[0].fits


def test_simple_rules_that_take_the_place_of_the_solver_are_told(monkeypatch):
    """No solution of one live set does for both, and the search for the smallest peak gives no answer."""

    def refused(problem, budget, *, max_seconds):
        raise planner.InfeasibleBudget(budget, budget + 1)

    def by_rules(problem, *, max_seconds):
        return replace(planner.leanest(problem), fallback="the machine is busy")

    monkeypatch.setattr(planner, "solve_in_process", refused)
    monkeypatch.setattr(planner, "least_peak_in_process", by_rules)
    group = solved(request_of(*(block_type(name, [8], (0, 0), packed=2) for name in "abc")), 40)
    assert group.solution.fallback == "the machine is busy"
