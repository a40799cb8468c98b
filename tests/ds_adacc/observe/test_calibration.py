"""The closed loop: what a step under a plan shows is compared with what was planned, and a wrong model put right."""

import re
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import zoo
from any_size import Training
from stack import ALLOWANCE, WIDTH, Model
from torch import nn
from torch.utils.checkpoint import checkpoint as reentrant

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.observe import calibration
from ds_adacc.observe.calibration import Pair, at_planned_sizes, observed_seconds
from ds_adacc.observe.step_profiler import Measured
from ds_adacc.plan.correction import Correction
from ds_adacc.plan.rank_reports import RankReport, merge_corrections
from ds_adacc.profile import profiler
from ds_adacc.profile.measure import measure
from ds_adacc.runtime.runtime import Runtime

CPU = torch.device("cpu")


def test_a_correction_counts_in_forward_and_at_every_event_of_backward():
    graph = planner.BlockGraph(
        (planner.Value("x", "other", 8, None, True),),
        (),
        (planner.Event("late", (0,), 5, 4), planner.Event("early", (0,), 0)),
        forward_overhead=3,
    )
    profile = planner.Profile(graph, (), ((),))
    more, less = (correction.applied_to(profile).graph for correction in (Correction(2, 7), Correction(-9, -2)))
    assert (more.forward_overhead, [event.gradient_bytes for event in more.events]) == (5, [12, 7])
    assert (less.forward_overhead, [event.gradient_bytes for event in less.events]) == (0, [3, 0])
    assert [event.made_bytes for event in (*more.events, *less.events)] == [4, 0, 3, 0], "a part of the gradients"


def test_copies_to_the_host_run_beside_the_measured_passes():
    x = planner.Value("x", "other", 8, None, True)
    graph = planner.BlockGraph((x,), (), (planner.Event("only", (0,), 0),))
    away = planner.CodecCost.offload(8, 0.5, 0.25)
    profile = planner.Profile(graph, (), ((away,),), overlap_seconds=(2.0, 1.0))
    policy = planner.Policy((planner.OFFLOAD,))
    in_force = SimpleNamespace(spec=SimpleNamespace(profile=profile))
    known = SimpleNamespace(policies=(policy,), in_force=in_force, plan_frees_what_is_kept=False)
    call = Measured("block type", policy, 0, 0, forward_seconds=2.0, backward_seconds=None)
    assert observed_seconds([call], {"block type": known}) == Pair(2.0, 2.0)


def test_corrections_together():
    one, other = Correction(2, None), Correction(-1, 4)
    assert one.larger(other) == other.larger(one) == Correction(2, 4)
    assert one.plus(other) == Correction(1, 4)
    assert other.upward() == Correction(0, 4)
    assert Correction(-3, None).upward() == Correction()


@pytest.mark.parametrize(("observed", "is_off"), [(105, False), (106, True), (95, False), (94, True)])
def test_what_is_off_by_more_than_a_twentieth(observed, is_off):
    assert Pair(100, observed).is_off is is_off


def test_a_correction_of_calls_with_more_bytes():
    assert Correction(2, None).scaled(1.5) == Correction(3, None)
    assert Correction(-4, 10).scaled(0.5) == Correction(-2, 5)


def test_what_another_size_has_taken_counts_for_the_planned_one():
    """The steps under the plan have shorter inputs; the peak is that of the plan all the same."""
    training = Training(rectifier={"enabled": False})
    training.compare(40)
    training.compare(20)
    assert training.runtime.controller.observation is None, "blocks were recorded in the step, so nothing was measured"
    training.compare(20)
    plan, seen = training.runtime.controller.plan, training.runtime.controller.observation
    assert len(plan.policies) == 1 and len(training.agreement.origins) == 1
    assert seen.peak.planned == plan.peak
    assert not seen.peak.is_off


def test_its_excess_grows_with_its_tensors():
    training = Training(rectifier={"enabled": False})
    for time in (40, 20, 30):
        training.compare(time)
    types, origins = training.agreement.known_types, training.agreement.origins
    half, middle = origins
    (planned,) = set(origins.values())

    def found(**excess):
        return at_planned_sizes(excess, types, origins)

    assert found(**{half: Correction(100, 10)}) == {planned: Correction(200, 20)}
    assert found(**{middle: Correction(30, None)}) == {planned: Correction(40, None)}
    assert found(**{half: Correction(10, 50), middle: Correction(30, 30)}) == {planned: Correction(40, 100)}
    assert found(**{half: Correction(100, 10), planned: Correction(1, 1)}) == {planned: Correction(1, 1)}


def trained(model, budget, steps=6):
    section = {"codecs": "none", "memory_budget": budget, "solver": {"max_seconds": 30.0}}
    runtime = Runtime(load({"adacc": section}))
    seen = []
    for _ in range(steps):
        model.step(runtime.checkpoint)
        if runtime.controller.observation is not None and runtime.controller.observation not in seen:
            seen.append(runtime.controller.observation)
    return runtime, seen


@pytest.fixture
def forgetful(monkeypatch):
    """Profiles know of no gradients."""

    def measured(*given):
        profile = measure(*given)
        events = tuple(replace(event, gradient_bytes=0) for event in profile.graph.events)
        return replace(profile, graph=replace(profile.graph, events=events))

    monkeypatch.setattr(profiler, "measure", measured)


@pytest.mark.usefixtures("forgetful")
def test_a_model_that_forgets_gradients_is_corrected():
    model = Model(lambda: zoo.GPTBlock(WIDTH, 4, 0.1))
    runtime, seen = trained(model, "12MiB")
    assert runtime.controller.plan.reason.startswith("the plan before took ")
    assert runtime.controller.plan.peak <= runtime.controller.plan.budget
    # No more than that: one correction serves all policies of a block type, so another plan may take less than it says.
    assert seen[-1].peak.observed <= runtime.controller.plan.budget
    assert model.peak(runtime.checkpoint) <= runtime.controller.plan.budget + ALLOWANCE


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("others", [[], [lambda: nn.Linear(WIDTH, WIDTH)]], ids=["one block", "the first of its type"])
def test_the_last_backward_is_observed_too(others):
    blocks = [lambda: zoo.InPlaceBlock(WIDTH), *others]
    makes = iter(blocks)
    model = Model(lambda: next(makes)(), layers=len(blocks))
    runtime, seen = trained(model, 0.6)  # torch 2.15 takes less, so that at 0.8 nothing would be off
    assert runtime.controller.plan.reason.startswith("the plan before took ")
    assert abs(model.peak(runtime.checkpoint) - seen[-1].peak.observed) <= ALLOWANCE


def test_a_backward_whose_end_does_not_show_is_not_called_observed(caplog):
    caplog.set_level("INFO", "ds_adacc")
    model = Model(lambda: zoo.InPlaceBlock(WIDTH), layers=1)
    model.leaf = model.leaf.detach()
    _, seen = trained(model, 0.95)
    assert {each.peak for each in seen} == {None}
    assert "the end of the last backward of InPlaceBlock cannot be seen, since none of its inputs" in caplog.text
    (table,) = re.findall(r"^  peak: .*$", caplog.text, re.MULTILINE)
    assert re.fullmatch(r"  peak: planned \S+ MiB; budget \S+ MiB", table)


def test_one_backward_whose_end_does_not_show_counts_as_planned(caplog):
    """As where the embeddings are frozen: the input of the first block gets no gradient."""
    caplog.set_level("INFO", "ds_adacc")
    model = Model(lambda: zoo.GPTBlock(WIDTH, 4, 0.1))
    model.leaf = model.leaf.detach()
    _, seen = trained(model, 0.8)
    assert seen and all(each.peak is not None for each in seen)
    told = "the observed peak counts one backward as planned: the end of the last backward of GPTBlock cannot be seen"
    assert told in caplog.text


def test_a_model_that_is_right_is_left_alone(equal_times):
    runtime, seen = trained(Model(lambda: zoo.GPTBlock(WIDTH, 4, 0.1)), 0.6)
    assert runtime.controller.plan.reason == "first step recorded"
    assert len(seen) == 1
    assert not seen[0].peak.is_off
    assert seen[0].seconds.observed > 0


def test_what_one_policy_takes_beyond_its_prediction_another_does_not_take():
    """The first block alone recomputes. It begins when nothing is held, so 4 MiB more do not matter there."""
    runtime, _ = trained(Model(lambda: zoo.GPTBlock(WIDTH, 4, 0.1)), 0.9)
    (group,) = runtime.controller.plan.groups
    (block_type,) = group.block_types
    first, others = planner.recompute_policy(block_type.profile), planner.retain_policy(block_type.profile)
    policies = ((first, *[others] * (block_type.blocks - 1)),)
    planned = group.peak_of(policies)
    solution = replace(group.solution, policies=policies, peak=planned)
    plan = replace(runtime.controller.plan, groups=(replace(group, solution=solution),))
    name, more = block_type.name, Correction(4 << 20)
    own = {(name, first): more, (name, others): Correction()}
    assert calibration.peak(plan, {name: more}, own) == Pair(planned, planned)
    assert calibration.peak(plan, {name: more}, {}).observed > planned


def test_the_time_of_a_forward_that_checks_a_predicted_size_is_no_observation(monkeypatch):
    """The check takes ten times as long as the forward."""
    calls = []

    def noting(measured, known_types):
        calls.extend(measured)
        return observed_seconds(measured, known_types)

    monkeypatch.setattr(calibration, "observed_seconds", noting)
    training = Training(memory_budget=0.4, rectifier={"enabled": False})
    for time in (9, 12, 15, 14):
        training.compare(time)
    first, *others = reversed(calls)  # these came in the order of backward
    assert first.forward_seconds is None and first.forward_growth > 0
    assert len(others) == 2 and all(call.forward_seconds > 0 and call.backward_seconds > 0 for call in others)


def backward_takes_most():
    """A block whose forward takes far less: no variable keeps what it makes."""
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


@pytest.mark.usefixtures("equal_times")
@pytest.mark.parametrize(("forward", "expected"), [(2 << 20, Correction(2 << 20, 0)), (0, Correction(0, -(2 << 20)))])
def test_a_plan_above_the_budget_is_corrected_upwards_only(monkeypatch, forward, expected):
    """The bytes that backward has not taken under this policy, it may take under the next one."""
    found = Correction(forward, -(2 << 20))
    monkeypatch.setattr(calibration, "excesses", lambda _, block_types: dict.fromkeys(block_types, found))
    runtime, _ = trained(Model(backward_takes_most), 0.5, steps=3)
    (block_type,) = runtime.agreement.known_types.values()
    assert block_type.plan.correction == expected


def test_three_plans_in_a_row_are_corrected_and_later_ones_again(monkeypatch):
    runtime, _ = trained(Model(lambda: zoo.GPTBlock(WIDTH, 4, 0.1)), 0.6)
    plan, block_types = runtime.controller.plan, runtime.agreement.known_types
    calibrator = calibration.Calibration(runtime.agreement.log)

    def corrects(excess):
        found = dict.fromkeys(block_types, Correction(excess))
        monkeypatch.setattr(calibration, "excesses", lambda *_: found)
        return bool(calibrator.compare(plan, Pair(0, 0), [], block_types, {}).live_sets)

    assert [corrects(4 << 20) for _ in range(4)] == [True, True, True, False]
    assert [corrects(4 << 20) for _ in range(3)] == [True, True, False]
    assert not corrects(0)
    assert corrects(4 << 20)


def test_a_rank_that_measured_nothing_has_no_say_in_a_correction():
    def merged(*corrections, agreed=Correction()):  # noqa: B008
        return merge_corrections([RankReport(None, 1, 1, {}, correction) for correction in corrections], agreed)

    assert merged(Correction(-5, -3), None) == merged(Correction(-5, -3), None, agreed=Correction(7, 7))
    assert merged(Correction(-5, -3), None) == Correction(-5, -3)
    assert merged(Correction(-5, -3), Correction()) == merged(None, None) == Correction()
    assert merged(None, None, agreed=Correction(7, 7)) == Correction(7, 7)


@pytest.mark.usefixtures("forgetful")
def test_where_nothing_fits_the_corrected_model_what_takes_least_is_in_force(caplog):
    model = Model(lambda: zoo.GPTBlock(WIDTH, 4, 0.1))
    with pytest.raises(planner.InfeasibleBudget) as error:
        trained(model, "1KiB")
    model = Model(lambda: zoo.GPTBlock(WIDTH, 4, 0.1))
    runtime, _ = trained(model, error.value.smallest)
    (group,) = runtime.controller.plan.groups
    with pytest.raises(planner.InfeasibleBudget) as error:
        planner.solve_per_block(group.problem, runtime.controller.plan.budget, max_seconds=30.0)
    assert error.value.smallest >= group.solution.peak > runtime.controller.plan.budget
    assert re.search(
        r"no plan is known that fits the budget of \S+ .iB. .+, with a peak of \S+ .iB. "
        r'"memory_budget": 0\.\d+ would allow it. A smaller micro-batch',
        caplog.text,
    )


def hooked(model, hook):
    """The model, with a hook that runs once in each backward of its last block."""
    model.blocks[-1].fc2.weight.register_hook(hook)
    return model


def test_what_another_takes_for_good_during_a_backward_is_not_the_blocks():
    buckets = []
    model = hooked(Model(lambda: zoo.GPTBlock(WIDTH, 4, 0.1)), lambda _: buckets.append(torch.empty(1 << 28)) or None)
    runtime, seen = trained(model, 0.6)
    assert runtime.controller.plan.reason == "first step recorded"
    assert not seen[-1].peak.is_off


def test_more_than_the_whole_block_is_doubted(caplog):
    def wasteful(gradient):
        torch.empty(1 << 28)

    model = hooked(Model(lambda: zoo.GPTBlock(WIDTH, 4, 0.1)), wasteful)
    runtime, seen = trained(model, 0.6)
    assert runtime.controller.plan.reason == "first step recorded"
    assert seen[-1].peak is None
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert re.match(r"while blocks like GPTBlock ran, 10..\... MiB more than planned was allocated\. ", warning)


def test_what_follows_a_call_of_a_tiny_block_is_not_told_as_that_of_others(caplog):
    """It takes a few states of the generator, which are larger than all that the block makes."""

    def make():
        return nn.Sequential(nn.Linear(zoo.WIDTH, zoo.WIDTH), nn.GELU(), nn.Dropout(0.1))

    training = Training(make, memory_budget=0.9, rectifier={"enabled": False})
    for time in (3, 4, 6, 5):
        training.compare(time, batch=1)
    assert training.runtime.controller.observation is not None
    assert not [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_profiler_on_another_thread(caplog):
    over = threading.Event()
    began = threading.Event()

    def profile():
        with torch.profiler.profile(profile_memory=True):
            began.set()
            over.wait()

    thread = threading.Thread(target=profile)
    thread.start()
    began.wait()
    runtime, seen = trained(Model(lambda: zoo.GPTBlock(WIDTH, 4, 0.1)), 0.6)
    over.set()
    thread.join()
    assert not seen[-1].peak.is_off
    assert runtime.controller.plan.reason == "first step recorded"


def test_blocks_inside_reentrant_checkpoints_are_run_but_not_measured():
    model = Model(lambda: zoo.GPTBlock(WIDTH, 4, 0.1))
    exact = Model(lambda: zoo.GPTBlock(WIDTH, 4, 0.1))
    runtime = Runtime(load({"adacc": {"codecs": "none", "memory_budget": "1GiB"}}), has_engine=True)
    model.step(runtime.checkpoint)
    exact.step(lambda block, x: block(x))
    runtime.controller.end_step()
    for each in (model, exact):
        each.blocks.zero_grad(set_to_none=False)
    for _ in range(5):
        for each, call in ((model, runtime.checkpoint), (exact, lambda block, x: block(x))):
            torch.manual_seed(0)
            each.step(lambda block, x, call=call: reentrant(call, block, x, use_reentrant=True))
        runtime.controller.end_step()
    assert not torch.autograd._profiler_enabled()
    pairs = zip(model.blocks.parameters(), exact.blocks.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
