"""Input sizes at which no plan fits the budget: the solver is asked once, not at each size that is larger still."""

from dataclasses import replace

import pytest
import zoo
from any_size import Training
from held import planned_peak
from two_programs import TwoPrograms

from ds_adacc import planner
from ds_adacc.plan import coordinator
from ds_adacc.plan.solve import Forgiven

pytestmark = pytest.mark.usefixtures("equal_times")


@pytest.fixture
def planned(monkeypatch):
    """The live sets of each plan."""
    asked, solve = [], coordinator.solve

    def noted(request, *args):
        asked.append(request.live_sets)
        return solve(request, *args)

    monkeypatch.setattr(coordinator, "solve", noted)
    return asked


@pytest.fixture
def training(planned):
    """Of one program, after a length that fits and one that no plan fits."""
    training = Training(zoo.GPTBlock, layers=4, memory_budget="400KiB", rectifier={"enabled": False})
    for length in (24, 26, 100):
        training.compare(length)
    assert len(planned) == 2
    assert len(training.agreement.unfit) == 1
    return training


def ran(training):
    """The block types that the blocks have called last."""
    return {block.variants()[0].digest for block in training.runtime.controller.blocks.all()}


def test_larger_lengths_run_the_policies_of_the_smallest_that_is_too_large(training, planned):
    (unfit,) = training.agreement.unfit
    for length in (104, 120, 101, 120):
        training.compare(length)
        assert {training.agreement.origin(name) for name in ran(training)} == unfit
        (name,) = ran(training)
        policies = {training.agreement.type_plans[each].policies for each in (name, *unfit)}
        assert len(policies) == 1
    assert len(planned) == 2


def test_smaller_lengths_are_planned_for_or_adopt_from_what_fits(training, planned):
    (unfit,) = training.agreement.unfit
    for length in (98, 28):
        training.compare(length)
    assert len(planned) == 3  # 98 might have fitted
    (name,) = ran(training)
    assert training.agreement.origin(name) not in unfit
    assert planned_peak(training.agreement, [training.agreement.type_plans[name]]) <= 400 << 10


def test_each_of_the_first_larger_lengths_is_warned_of(training, caplog):
    caplog.clear()
    for length in range(104, 112):
        training.compare(length)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 3
    (name,) = ran(training)
    assert said[0].startswith("GPTBlock: no plan is known that fits the budget at the new input sizes")
    assert "above the budget of 400.00 KiB (new sizes like these so far: 3)" in said[2]
    assert planned_peak(training.agreement, [training.agreement.type_plans[name]]) > 400 << 10


def test_of_two_programs_both_must_be_as_large(planned):
    training = TwoPrograms(memory_budget="170KiB", enabled=False)
    for pair in ((16, 16), (18, 18), (62, 59)):
        training.step(pair)
    count = len(planned)
    for pair in ((62, 60), (64, 59), (63, 61), (64, 61)):
        training.step(pair)
    assert len(planned) == count
    training.step((61, 80))
    assert len(planned) == count + 1


def test_a_longer_batch_of_fewer_texts_is_planned_for(training, planned):
    """It may fit: what attention takes while it runs grows with the length, and not so with the number of texts."""
    training.compare(200, batch=1)
    assert len(planned) == 3


def test_sizes_that_a_later_plan_fits_are_not_too_large_any_more(training, planned):
    (unfit,) = training.agreement.unfit
    training.agreement.budget.limit = 4 << 20  # in place of inputs that are held elsewhere from now on
    training.runtime.controller.planning.decide(
        training.runtime.controller.step, [unfit], "block inputs are held in another way", Forgiven.ALL
    )
    assert not training.agreement.unfit


def test_a_type_that_kept_its_policies_above_the_budget_hands_on_none_that_take_more():
    """It retains everything, as that fits beside short inputs of the other program."""
    training = TwoPrograms(memory_budget="320KiB", enabled=False)
    for pair in ((24, 8), (26, 8), (24, 300), (28, 320)):
        training.step(pair)
    agreement = training.runtime.agreement
    names = {block.variants()[0].digest for block in training.runtime.controller.blocks.all()}
    agreed = [agreement.type_plans[name] for name in names]
    assert names & agreement.origins.keys()
    for each in agreed:
        recomputes = planner.recompute_policy(each.spec.profile)
        lean = [replace(e, policies=(recomputes,) * len(e.policies)) if e is each else e for e in agreed]
        if each.spec.name in agreement.origins:
            assert planned_peak(agreement, agreed) <= planned_peak(agreement, lean)
