"""Which part of a step is whose."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

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


def test_of_a_forward_that_has_run_before_no_bytes_are_told():
    recorded = call(0, backward=5)
    recorded.was_recorded = True
    recorded.finished = Moment(9, 9)
    assert measured(recorded) == [(None, (5, 9), 4)]


def test_the_last_backward_ends_with_the_gradient_of_an_input():
    first, last = call(0, backward=5), call(1, backward=3)
    first.finished = Moment(9, 9)
    last.finished = Moment(8, 8)  # an input that both read: its gradient is complete after both
    assert measured(first, last) == [((1, 1.5), (3, 5), 2), ((0, 0.5), (5, 9), 4)]


def test_a_parameter_among_the_inputs_may_be_gathered_within_the_call():
    given = nn.Parameter(torch.empty(0))
    given.ds_shape = torch.Size([4])
    nodes = StepProfiler(torch.device("cpu")).note_end(call(0), [given])  # they live as long as the forward
    given.data = torch.ones(4)
    (2 * given).sum().backward()
    assert nodes == []
    assert torch.equal(given.grad, torch.full((4,), 2.0))


def test_moments_are_those_of_the_profiled_device(monkeypatch):
    """The current device may be another one, where nothing runs."""
    streams = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"that of {device}")
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: SimpleNamespace(record=streams.append))
    StepProfiler(torch.device("cuda", 1)).now()
    assert streams == ["that of cuda:1"]


def steps_before_end(*inputs):
    """How many of the steps of a block's backward have run when it counts as ended, and how many there are."""
    profiler, moments, steps = StepProfiler(torch.device("cpu")), CallMoments("block", None, Moment(0, 0)), []
    profiler.now = lambda: len(steps)
    kept = profiler.note_end(moments, inputs)
    x, other = inputs
    made = [x.cos(), deep := other.exp(), deep.sin()]
    made.append(made[0] * made[2])
    kept.clear()  # forward is over
    nodes = [tensor.grad_fn for tensor in made if tensor.grad_fn is not None]
    for node in nodes:
        node.register_hook(lambda *_: steps.append(None))
    made[-1].register_hook(lambda _: setattr(moments, "backward", 0))
    made[-1].sum().backward(retain_graph=True)
    found = moments.finished
    profiler.restart()
    made[-1].sum().backward()
    assert moments.finished == found, "no hook is left"
    return found, len(nodes)


@pytest.mark.parametrize(
    "make", [torch.Tensor.requires_grad_, lambda x: x.requires_grad_().tanh()], ids=["leaf", "made"]
)
def test_a_backward_has_ended_when_the_last_step_of_the_block_has_run(make):
    frozen = torch.randn(3)
    assert steps_before_end(make(torch.randn(3)), make(torch.randn(3))) == (4, 4)
    assert steps_before_end(frozen, make(torch.randn(3))) == (3, 3)
    assert steps_before_end(make(torch.randn(3)), frozen) == (2, 2)


def test_without_a_gradient_of_an_input_no_end_shows():
    weight, x = torch.randn(3, requires_grad=True), torch.randn(3)
    profiler, moments = StepProfiler(torch.device("cpu")), CallMoments("block", None, Moment(0, 0))
    profiler.note_end(moments, (x,))
    moments.backward = Moment(1, 1)
    (x * weight).sum().backward()
    assert moments.finished is None


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
