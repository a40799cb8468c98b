"""Policies are approved block by block, by the worst error that any rank has measured."""

import random

import pytest

from ds_adacc.plan.approvals import Approvals, worst
from ds_adacc.planner import HOPELESS, RETAIN, BlockGraph, CodecCost, Event, Op, Policy, Profile, Strictness, Value
from ds_adacc.profile.gradient_error import PolicyError
from ds_adacc.steps.step_schedule import StepSchedule

GRAPH = BlockGraph(
    (Value("x", "other", 64, None, True), Value("y", "other", 64, 0, True)),
    (Op("f", (0,), (1,), True),),
    (Event("backward", (0, 1), 0),),
)
PROFILE = Profile(
    GRAPH,
    (1.0,),
    ((), (CodecCost("int4", 16, 0.0, 0.0, 0.1, 0, 0.05), CodecCost("bits", 2, 0, 0, 0, 0, lossless=True))),
)
LOSSY, OTHER, EXACT = Policy((RETAIN, "int4")), Policy((RETAIN, None)), Policy((RETAIN, "bits"))
TWICE = Strictness((1.0, 2.0), (0.0,))


def rejected(error=0.5, strictness=TWICE, policy=LOSSY):
    return PolicyError(policy, error, strictness)


def test_lossless_policies_may_always_run_and_lossy_ones_once_measured():
    approvals = Approvals(0.1)
    assert approvals.permit(("a", 0), OTHER, PROFILE) and approvals.permit(("a", 0), EXACT, PROFILE)
    assert not approvals.permit(("a", 0), LOSSY, PROFILE)
    assert approvals.judge([(("a", 0), PolicyError(LOSSY, 0.1))]) == {}
    assert approvals.permit(("a", 0), LOSSY, PROFILE)
    assert not approvals.permit(("a", 1), LOSSY, PROFILE)  # another block
    assert approvals.error(("a", 0), LOSSY) == 0.1


def test_a_policy_that_differs_in_what_it_moves_to_the_host_needs_no_new_measurement():
    away = Policy(("offload", "offload int4"))
    approvals = Approvals(0.1)
    approvals.judge([(("a", 0), PolicyError(LOSSY, 0.05)), (("b", 0), rejected(policy=away))])
    assert approvals.error(("a", 0), away) == 0.05 and approvals.knows(("a", 0), away)
    assert approvals.is_rejected(("b", 0), LOSSY) and approvals.is_rejected(("b", 0), away)
    approvals.judge([(("a", 0), PolicyError(away, 0.07))])
    assert approvals.error(("a", 0), LOSSY) == 0.07 and len(approvals.blocks["a", 0].approved) == 1


def test_what_is_measured_of_blocks_in_an_unknown_place_permits_nothing():
    approvals = Approvals(0.1)
    approvals.judge([(("b", None), PolicyError(LOSSY, 0.05))])
    assert not approvals.permit(("b", None), LOSSY, PROFILE)


def test_blocks_that_have_moved_are_measured_anew():
    approvals = Approvals(0.1)
    approvals.judge([(("b", 0), PolicyError(LOSSY, 0.05)), (("c", 0), PolicyError(LOSSY, 0.05))])
    approvals.forget({"b"})
    assert not approvals.permit(("b", 0), LOSSY, PROFILE) and approvals.permit(("c", 0), LOSSY, PROFILE)


def test_without_a_bound_everything_may_run():
    assert Approvals(None).permit(("a", 0), LOSSY, PROFILE)


def test_the_worst_rank_decides():
    approvals = Approvals(0.1)
    everyone = [(("a", 0), PolicyError(LOSSY, 0.05)), (("a", 0), rejected(0.2))]
    assert approvals.judge(worst(everyone)) == {("a", 0): rejected(0.2)}
    assert not approvals.permit(("a", 0), LOSSY, PROFILE)


def test_policies_of_one_block_at_several_sizes_are_judged_each_by_its_own_error():
    """Ranks, or micro-batches of one rank, meet several input sizes in one step."""
    approvals = Approvals(0.1)
    everyone = [(("a", 0), rejected(0.2, policy=OTHER)), (("a", 0), PolicyError(LOSSY, 0.05))]
    assert approvals.judge(worst(everyone)) == {("a", 0): rejected(0.2, policy=OTHER)}
    assert approvals.is_rejected(("a", 0), OTHER) and not approvals.is_rejected(("a", 0), LOSSY)
    assert approvals.error(("a", 0), LOSSY) == 0.05


def test_a_step_counts_as_one_rejection_of_a_block_whatever_it_measured():
    approvals = Approvals(0.1)
    for _ in range(3):
        approvals.judge([(("a", 0), rejected(policy=policy)) for policy in (LOSSY, OTHER)])
    assert approvals.blocks["a", 0].rejections == 3


def test_an_approved_policy_that_errs_later_is_rejected():
    approvals = Approvals(0.1)
    approvals.judge([(("a", 0), PolicyError(LOSSY, 0.05))])
    approvals.judge([(("a", 0), rejected())])
    assert not approvals.permit(("a", 0), LOSSY, PROFILE)


def test_what_was_approved_before_a_rejection_is_tried_anew():
    """The rejected policy may share a codec with it, on a value whose error has grown since."""
    approvals, both = Approvals(0.1), Policy(("int4", "int4"))
    approvals.judge([(("a", 0), PolicyError(LOSSY, 0.05)), (("a", 1), PolicyError(LOSSY, 0.05))])
    approvals.judge([(("a", 0), PolicyError(both, 0.08))])
    assert approvals.permit(("a", 0), LOSSY, PROFILE)
    approvals.judge([(("a", 0), rejected(3.0, policy=both))])
    assert not approvals.permit(("a", 0), LOSSY, PROFILE) and not approvals.knows(("a", 0), LOSSY)
    assert approvals.permit(("a", 1), LOSSY, PROFILE), "of another block nothing was rejected"
    approvals.judge([(("a", 0), PolicyError(LOSSY, 0.06))])
    assert approvals.permit(("a", 0), LOSSY, PROFILE) and approvals.error(("a", 0), LOSSY) == 0.06


def test_an_approval_of_what_was_approved_before_does_not_keep_a_search_alive():
    """One size of the block runs an old policy, and rejects whatever is planned for another size."""
    approvals = Approvals(0.1)
    approvals.judge([(("a", 0), PolicyError(LOSSY, 0.05))])
    for number in range(4):
        assert approvals.blocks["a", 0].rejections == number
        approvals.judge([(("a", 0), rejected(policy=Policy((f"int{number}", None))))])
        assert not approvals.permit(("a", 0), LOSSY, PROFILE)
        approvals.judge([(("a", 0), PolicyError(LOSSY, 0.05))])
        assert approvals.permit(("a", 0), LOSSY, PROFILE)
    assert approvals.strictness("a", 1)[0].factors == (HOPELESS, HOPELESS)


def test_each_block_has_its_strictness_unless_there_are_many():
    approvals = Approvals(0.1)
    assert approvals.strictness("a", 3) == ()
    approvals.judge([(("a", 1), rejected())])
    first, strict, last = approvals.strictness("a", 3)
    assert first is None and last is None
    assert strict.factors[1] >= 2 > strict.factors[0] == 1
    approvals.judge([(("a", i), rejected(strictness=Strictness((1.0, 9.0**i), (0.0,)))) for i in range(3)])
    assert len(set(approvals.strictness("a", 3))) == 1  # three kinds would be three block types for the solver


def test_blocks_that_share_one_policy_share_the_strictest():
    approvals = Approvals(0.1)
    approvals.judge([(("a", 5), rejected())])
    (only,) = approvals.strictness("a", 1)
    assert only.factors[1] >= 2


def test_a_block_rejected_again_and_again_is_planned_without_lossy_codecs():
    approvals = Approvals(0.1)
    for _ in range(4):
        assert approvals.strictness("a", 1) == () or approvals.strictness("a", 1)[0].factors[1] < HOPELESS
        approvals.judge([(("a", 0), rejected())])
    (strict,) = approvals.strictness("a", 1)
    assert not any(cost.error for costs in strict.applied_to(PROFILE).codecs for cost in costs)


def test_rejections_count_until_a_policy_is_approved():
    approvals = Approvals(0.1)
    for _ in range(3):
        for _ in range(3):
            approvals.judge([(("a", 0), rejected())])
        (strict,) = approvals.strictness("a", 1)
        assert strict.factors[1] < HOPELESS
        approvals.judge([(("a", 0), PolicyError(LOSSY, 0.05))])


def test_after_an_approval_a_new_rejection_tells_anew_how_strict_to_be():
    approvals = Approvals(0.1)
    approvals.judge([(("a", 0), rejected(strictness=Strictness((9.0, 1.0), (0.0,))))])
    approvals.judge([(("a", 0), PolicyError(LOSSY, 0.05))])
    assert approvals.strictness("a", 1)[0].factors[0] >= 9, "it stays in force for plans that are made meanwhile"
    approvals.judge([(("a", 0), rejected())])
    assert approvals.strictness("a", 1)[0].factors[0] == 1


def test_a_block_without_lossy_codecs_takes_no_other_one_along():
    approvals = Approvals(0.1)
    for _ in range(4):
        approvals.judge([(("a", 0), rejected())])
    approvals.judge([(("a", i), rejected(strictness=Strictness((1.0, 9.0**i), (0.0,)))) for i in range(1, 4)])
    hopeless, *others = approvals.strictness("a", 4)
    assert hopeless.factors == (HOPELESS, HOPELESS)
    assert len(set(others)) == 1 and HOPELESS not in others[0].factors


def test_a_smaller_error_later_makes_a_block_no_stricter():
    approvals, factors = Approvals(0.1), tuple(1.1**power for power in range(-60, 60))
    approvals.judge([(("a", 0), rejected(strictness=Strictness(factors, (0.0,))))])
    before = approvals.strictness("a", 1)
    approvals.judge([(("a", 0), rejected(strictness=Strictness((0.0,) * len(factors), (0.0,))))])
    assert approvals.strictness("a", 1) == before


def test_errors_rise_if_the_same_growth_once_more_would_break_the_bound():
    approvals, key = Approvals(0.1), ("a", 0)
    assert not approvals.are_rising([(key, PolicyError(LOSSY, 0.09))])  # nothing to compare with
    approvals.judge([(key, PolicyError(LOSSY, 0.05))])
    assert not approvals.are_rising([(key, PolicyError(LOSSY, 0.07))])  # 1.4 times; 0.098 is next
    assert approvals.are_rising(worst([(key, PolicyError(LOSSY, 0.072)), (key, PolicyError(LOSSY, 0.05))]))
    assert not approvals.are_rising([(("a", 1), PolicyError(LOSSY, 0.2))])


def test_an_error_that_grows_from_nothing_is_rising():
    """A gate that begins at zero opens: by what factor the error will grow, nobody knows."""
    approvals, key = Approvals(0.1), ("a", 0)
    approvals.judge([(key, PolicyError(LOSSY, 0.0))])
    assert not approvals.are_rising([(key, PolicyError(LOSSY, 0.0))])
    assert approvals.are_rising([(key, PolicyError(LOSSY, 0.01))])


def test_the_largest_error_counts_not_the_last():
    approvals, key = Approvals(0.1), ("a", 0)
    for error in (0.05, 0.08, 0.04):
        approvals.judge([(key, PolicyError(LOSSY, error))])
    assert approvals.error(key, LOSSY) == 0.08
    assert not approvals.are_rising([(key, PolicyError(LOSSY, 0.07))])


@pytest.mark.parametrize("seed", range(20))
def test_errors_that_only_scatter_are_looked_at_ever_more_rarely(seed):
    """From batch to batch, errors of all blocks go up and down together, by half their size."""
    draw, approvals, schedule, looks = random.Random(seed), Approvals(0.1), StepSchedule(), 0
    for _ in range(1000):
        schedule = schedule.with_step_ended()
        if schedule.ended < schedule.track_from:
            continue
        batch = draw.uniform(0.5, 1.0)
        found = [(("a", i), PolicyError(LOSSY, 0.09 * batch * draw.uniform(0.9, 1.0))) for i in range(24)]
        rising = approvals.are_rising(found)
        assert approvals.judge(found) == {}
        schedule, looks = schedule.after_tracking(False, rising, longest=1024), looks + 1
    assert looks <= 15


def test_types_that_are_forgotten_take_their_errors_along():
    approvals = Approvals(0.1)
    approvals.judge([(("a", 0), PolicyError(LOSSY, 0.1)), (("b", 0), PolicyError(LOSSY, 0.1))])
    approvals.forget_all_but(["b"])
    assert [approvals.error((name, 0), LOSSY) for name in "ab"] == [None, pytest.approx(0.1)]
