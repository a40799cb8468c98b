"""Ranks whose batches have other lengths at every step: exact, agreed, and no rank plans because another met one."""

from itertools import pairwise

import pytest
from cases import further
from launch import told_by

pytestmark = pytest.mark.ranks
by_stage = pytest.mark.parametrize("stage", [further("1"), "3"])


ranks = told_by("lengths_worker", values_of="stage")


def of(step, *names):
    return [step[name] for name in names]


@by_stage
def test_losses_are_bit_identical_and_bytes_as_planned(ranks, stage):
    for rank in ranks:
        plain, served = rank[stage]
        assert [of(step, "length", "loss") for step in served] == [of(step, "length", "loss") for step in plain]
        assert len({step["length"] for step in plain}) == len(plain)
        assert all(planned == observed > 0 for planned, observed in (step["held"] for step in served[1:]))


@by_stage
def test_both_ranks_ask_the_same_and_call_as_many_collectives(ranks, stage):
    first, second = (rank[stage][1] for rank in ranks)
    assert all(one["length"] != other["length"] for one, other in zip(first, second, strict=True))
    for one, other in zip(first, second, strict=True):
        assert of(one, "purpose", "collectives") == of(other, "purpose", "collectives")
        assert {**one["asked"], "_solve": 0} == {**other["asked"], "_solve": 0}
    for step in first:
        assert step["asked"]["_solve"] == step["asked"]["decide"], "the first rank alone solves"
    assert not any(step["asked"]["_solve"] for step in second)


@by_stage
def test_new_lengths_are_no_reason_to_plan_or_to_wait(ranks, stage):
    for rank in ranks:
        plain, served = rank[stage]
        reasons = [step["reason"] for step in served if step["asked"]["decide"]]
        assert served[0]["asked"]["decide"] and reasons == ["first step recorded"]
        quiet = [number for number, step in enumerate(served) if step["purpose"] == "run"]
        assert len(quiet) >= 10
        for number in quiet:
            assert {name: times for name, times in served[number]["asked"].items() if times} == {"vote": 1}
            assert served[number]["collectives"] == plain[number]["collectives"] + 1, "the vote, which is not awaited"
        for before, step in pairwise(served[2:]):
            assert step["recordings"] - before["recordings"] == (step["purpose"] == "track")


def test_outliers_that_drift_bring_new_plans_on_both_ranks_alike(ranks):
    """Each rank has adopted sizes that the other one has never met."""
    first, second = (rank["lossy"] for rank in ranks)
    assert sum(step["asked"]["decide"] for step in first) >= 3
    for one, other in zip(first, second, strict=True):
        assert of(one, "purpose", "schedule", "collectives") == of(other, "purpose", "schedule", "collectives")
