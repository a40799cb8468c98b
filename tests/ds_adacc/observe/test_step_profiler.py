"""Which part of a step is whose."""

import torch

from ds_adacc.observe.step_profiler import CallMoments, Moment, StepProfiler


class Trace:
    def growth(self, begin, end):
        return begin, end

    def transient(self, begin, end, results):
        return begin, end

    def stop(self):
        return True


def call(began, backward=None):
    moments = CallMoments("block", None, Moment(began, began))
    moments.ended = Moment(began + 0.5, began + 0.5)
    moments.backward = None if backward is None else Moment(backward, backward)
    return moments


def measured(*calls):
    meter = StepProfiler(torch.device("cpu"))
    meter._trace, meter._calls = Trace(), list(calls)
    return [(one.forward_growth, one.backward_growth, one.backward_seconds) for one in meter.stop()]


def test_a_backward_ends_where_the_next_begins():
    assert measured(call(0, backward=5), call(1, backward=3)) == [((1, 1.5), (3, 5), 2), ((0, 0.5), None, None)]


def test_seconds_in_which_more_runs_than_the_plan_are_not_told():
    checked, probed = call(0, backward=5), call(1, backward=3)
    checked.times_forward = probed.times_forward = probed.times_backward = False
    meter = StepProfiler(torch.device("cpu"))
    meter._trace, meter._calls = Trace(), [checked, probed, call(2, backward=2.5)]
    found = [(one.forward_growth, one.forward_seconds, one.backward_seconds) for one in meter.stop()]
    assert found == [((2, 2.5), 0.5, 0.5), ((1, 1.5), None, None), ((0, 0.5), None, None)]


def test_a_backward_ends_where_a_forward_comes_between_as_in_a_pipeline():
    windows = measured(call(0, backward=2), call(1, backward=6), call(4))
    assert windows == [((0, 0.5), (2, 4), 2), ((1, 1.5), None, None)]
