"""What the steps of a run are for, and what a step keeps of the passes that it has seen."""

import torch
import zoo
from any_size import Training

from ds_adacc.config import load
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.steps.step_schedule import Purpose, StepSchedule


def test_a_new_plan_is_measured_in_the_next_step_and_once():
    schedule = StepSchedule().with_step_ended().with_new_plan(tries=False)
    assert schedule.observe_in == 0 and schedule.measures and not schedule.tries
    assert schedule.with_step_ended().after_observation().observe_in is None


def test_a_step_that_could_not_measure_is_followed_by_another_at_most_seven_times():
    schedule, attempts = StepSchedule().with_new_plan(tries=False), 1
    while schedule.may_measure_again:
        schedule = schedule.with_step_ended().after_observation().with_measurement_again()
        attempts += 1
        assert schedule.observe_in == 0 and schedule.measures
    assert attempts == 8
    assert schedule.with_new_plan(tries=False).may_measure_again, "another plan is counted anew"


def test_a_new_plan_on_trial_is_measured_in_the_step_after():
    schedule = StepSchedule().with_step_ended().with_new_plan(tries=True)
    assert schedule.tries and schedule.with_state_saved() == schedule
    after = schedule.with_step_ended().after_observation()
    assert not after.tries and after.observe_in == 0 and after.measures


def test_a_measurement_is_put_off_once_by_a_save_and_then_made_a_look():
    schedule = StepSchedule(ended=1).with_new_plan(tries=False)
    once = schedule.with_state_saved()
    assert once.observe_in == 1 and once.after_observation().observe_in == 0
    twice = once.after_observation().with_state_saved()
    assert twice.observe_in == 0 and not twice.measures
    assert twice.with_state_saved() == twice and twice.after_observation().observe_in is None
    assert StepSchedule(ended=1).with_state_saved() == StepSchedule(ended=1)


def test_the_interval_doubles_until_a_policy_changes():
    schedule, intervals = StepSchedule(ended=3), []
    for changed in (False, False, False, True, False):
        schedule = schedule.after_tracking(changed, errors_rise=False, longest=4)
        intervals.append(schedule.interval)
    assert intervals == [2, 4, 4, 1, 2]
    risen = [StepSchedule(interval=i).after_tracking(False, errors_rise=True, longest=8).interval for i in (1, 2, 8)]
    assert risen == [1, 1, 4]
    assert schedule.track_from == 3 + 2


def test_a_resumed_run_keeps_to_a_shorter_interval():
    schedule = StepSchedule(ended=10, track_from=40, interval=32).no_longer_than(8)
    assert (schedule.interval, schedule.track_from) == (8, 18)


def runtime():
    return Runtime(load({"adacc": {"memory_budget": "1GiB", "codecs": "none"}}), has_engine=True)


def forward(runs, blocks, length):
    x = torch.randn(length, 4, requires_grad=True)
    for block in blocks:
        x = runs.checkpoint(block, x)
    return x.sum()


def test_two_backwards_of_one_forward_leave_the_next_micro_batch_its_order():
    """Two losses, each with a backward of its own: the second finds no block called since the first."""
    runs, blocks = runtime(), [zoo.Tiny() for _ in range(3)]
    losses = [forward(runs, blocks, 2), forward(runs, blocks, 2)]
    for loss in losses:
        loss.backward()
        runs.controller.end_backward()
    forward(runs, blocks, 5).backward()
    runs.controller.end_backward()
    assert all(seen.calls for seen in runs.controller.step.passes.values())
    runs.controller.end_step()
    order = runs.agreement.forward_order
    for name in runs.agreement.known_types:
        assert [order.index(runs.blocks.of(block), name) for block in blocks] == [0, 1, 2]


def test_every_step_has_one_purpose():
    runs, block, purposes = runtime(), zoo.Tiny(), []
    for _ in range(6):
        purposes.append(runs.controller.step.purpose)
        forward(runs, [block], 2).backward()
        runs.controller.end_step()
    assert purposes[:3] == [Purpose.OBSERVE, Purpose.MEASURE, Purpose.TRACK]
    assert purposes[3:] == [Purpose.RUN, Purpose.TRACK, Purpose.RUN]


def test_trials_that_did_not_end_are_repeated_after_longer_and_longer_pauses():
    schedule, tried = StepSchedule(ended=1).with_new_plan(tries=True), []
    while len(tried) < 13:
        purpose = schedule.next_purpose(tracks=False)
        schedule = schedule.with_step_ended().after_observation()
        if purpose is Purpose.TRY:
            tried.append(schedule.ended)
            schedule = schedule.with_trials_again()
            assert schedule.with_trials_again() == schedule
            assert schedule.observe_in == {2: 1, 3: 0}.get(schedule.ended), "the plan is observed once"
    assert tried == [2, 3, 5, 9, 17, 33, 65, 129, 257, 513, 1025, 2049, 3073]


def test_a_rank_that_calls_no_block_knows_that_a_plan_has_run():
    """The others take it from their observation, and all must do the same when no plan fits later."""
    training = Training(rectifier={"enabled": False})
    training.compare(9)
    controller = training.runtime.controller
    assert controller.plan is not None and not controller.planning.has_run_a_plan
    training.adacc.end_step()
    assert controller.observation is None and controller.planning.has_run_a_plan
