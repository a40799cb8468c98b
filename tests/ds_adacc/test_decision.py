"""Which kinds share the budget, and what becomes of those that do not fit."""

import pytest

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.decision import decide, joined

MIB = 1 << 20


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([], []),
        ([()], []),
        ([("b", "a"), ("c",)], [("a", "b"), ("c",)]),
        ([("a", "b"), ("c", "d"), ("b", "c"), ("e",)], [("a", "b", "c", "d"), ("e",)]),
        ([("a",), ("a",)], [("a",)]),
    ],
)
def test_overlapping_groups_are_one(groups, expected):
    assert joined(groups) == expected


def kind(name, mebibytes):
    """Three values of this size in a row, each recomputable from the one before, all saved."""
    size = mebibytes * MIB
    values = tuple(planner.Value(f"x{i}", "other", size, i - 1 if i else None, True) for i in range(3))
    ops = tuple(planner.Op(f"op{i}", (i,), (i + 1,), True) for i in range(2))
    events = tuple(planner.Event(f"e{i}", (i,), 0) for i in range(2, -1, -1))
    graph = planner.BlockGraph(values, ops, events)
    return planner.Kind(name, planner.Profile(graph, (0.001, 0.001), ((), (), ())), 4)


def decided(sizes, groups, budget, standing=None, must_fit=True):
    section = {"memory_budget": budget, "codecs": "none", "solver": {"max_seconds": 10.0}}
    kinds = {name: kind(name, size) for name, size in sizes.items()}
    return decide(kinds, groups, 1 << 40, load({"adacc": section}), "test", standing, must_fit)


def test_kinds_that_never_run_together_have_the_whole_budget_each():
    apart = decided({"a": 1, "b": 1}, [("a",), ("b",)], "12MiB")
    assert [group.solution.added_seconds for group in apart.groups] == [0, 0]
    together = decided({"a": 1, "b": 1}, [("a", "b")], "12MiB")
    assert together.peak <= together.budget == 12 * MIB < together.without
    assert together.added_seconds > 0


def test_a_fraction_is_of_the_group_that_takes_the_most():
    decision = decided({"a": 1, "b": 3}, [("a",), ("b",)], 0.5)
    assert decision.without == max(decided({n: s}, [(n,)], 1.0).without for n, s in (("a", 1), ("b", 3)))
    assert decision.budget == decision.without // 2


def test_the_error_names_what_all_groups_would_fit():
    with pytest.raises(planner.InfeasibleBudget) as error:
        decided({"a": 1, "b": 3}, [("a",), ("b",)], "1MiB")
    assert decided({"a": 1, "b": 3}, [("a",), ("b",)], f"{error.value.smallest}B").peak <= error.value.smallest


def test_what_need_not_fit_is_recomputed_and_the_rest_planned():
    decision = decided({"a": 1, "b": 3}, [("a",), ("b",)], 1.0, standing=12 * MIB, must_fit=False)
    small, large = decision.groups
    assert small.solution.added_seconds == 0
    assert large.solution.peak > decision.budget
    assert "too small" in decision.shortfall
