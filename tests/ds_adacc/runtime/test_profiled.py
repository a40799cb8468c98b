"""Steps under a profiler of the user's own, of which Python allows one at a time."""

import cProfile
import sys
from contextlib import contextmanager

import pytest
import torch
import zoo
from any_size import Training
from functions import Plain
from torch import nn

from ds_adacc.execute.input_placement import InputPlacement
from ds_adacc.runtime import planned_calls as room
from ds_adacc.steps.step_schedule import Purpose

RECORDED, PREDICTED = (20, 12, 17), 15


@contextmanager
def function_of_python():
    sys.setprofile(lambda frame, event, argument: None)
    try:
        yield
    finally:
        sys.setprofile(None)


PROFILERS = {
    "cProfile": cProfile.Profile,
    "torch": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True),
    "function": function_of_python,
}
each_profiler = pytest.mark.parametrize("profiler", PROFILERS.values(), ids=PROFILERS)
# Those beside which there can be no other one. From Python 3.12 on cProfile leaves sys.setprofile to others.
SOLE = {name: profiler for name, profiler in PROFILERS.items() if name != "cProfile" or sys.version_info < (3, 12)}
each_sole_profiler = pytest.mark.parametrize("profiler", SOLE.values(), ids=SOLE)


class WithFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(zoo.WIDTH, zoo.WIDTH), nn.Linear(zoo.WIDTH, zoo.WIDTH)

    def forward(self, x):
        return x + self.b(Plain.apply(self.a(x)).tanh())


def profiled_step(training, profiler, time):
    """The step, in which the profiler stays the one that is told."""
    with profiler():
        told = sys.getprofile()
        training.compare(time)
        assert sys.getprofile() is told


@pytest.fixture
def followed(monkeypatch):
    """Whether each call that was followed ran as predicted."""
    seen = []

    def follow(*args):
        output, is_as_predicted, reads = original(*args)
        seen.append(is_as_predicted)
        return output, is_as_predicted, reads

    original = room.follow
    monkeypatch.setattr(room, "follow", follow)
    return seen


@each_profiler
def test_a_predicted_size_is_followed(profiler, followed, caplog):
    training = Training(rectifier={"enabled": False})
    for time in RECORDED:
        training.compare(time)
    before = training.runtime.recordings
    followed.clear()
    profiled_step(training, profiler, PREDICTED)
    assert followed and all(followed)
    assert training.runtime.recordings == before
    assert "without ds_adacc" not in caplog.text


@each_sole_profiler
def test_a_predicted_size_with_a_function_waits_until_the_profiler_is_gone(profiler, followed, caplog):
    training = Training(WithFunction, rectifier={"enabled": False}, memory_budget=0.7)
    for time in RECORDED:
        training.compare(time)
    before = training.runtime.recordings
    followed.clear()
    profiled_step(training, profiler, PREDICTED)
    assert not followed
    assert "runs without ds_adacc, under plain autograd: a profiler of Python's calls is running" in caplog.text
    training.compare(PREDICTED)
    assert followed == [True]
    assert training.runtime.recordings == before


@each_sole_profiler
def test_a_tracking_step_keeps_to_the_plan(profiler, caplog):
    training = Training()
    training.compare(RECORDED[0])
    while training.runtime.controller.step.purpose is not Purpose.TRACK:
        training.compare(RECORDED[0])
    before = training.runtime.recordings
    profiled_step(training, profiler, RECORDED[0])
    assert training.purposes[-1] is Purpose.TRACK
    assert training.runtime.recordings == before
    assert "without ds_adacc" not in caplog.text


@pytest.mark.parametrize("sizes", [(), RECORDED], ids=["recorded", "followed"])
def test_a_call_that_cannot_run_as_planned_is_an_error_where_ranks_share_inputs(sizes):
    """The other ranks, which have no profiler, would wait in backward for this rank's share."""
    training = Training(WithFunction, rectifier={"enabled": False}, memory_budget=0.7)
    for time in sizes:
        training.compare(time)
    training.agreement.inputs = InputPlacement(group=object())
    with pytest.raises(RuntimeError, match=r"cannot run as planned in this call: a profiler.*partition_activations"):
        profiled_step(training, function_of_python, PREDICTED)
