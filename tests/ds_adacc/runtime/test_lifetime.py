"""Nothing outlives its model: its weights are freed as soon as it is deleted, without Python's cyclic collector."""

import copy
import functools
import gc
import logging
import types
import weakref

import pytest
import torch
import zoo
from torch import nn

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.runtime.runtime import Runtime

LOSSLESS = {"memory_budget": 0.8, "codecs": "none", "solver": {"max_seconds": 30.0}}
LOSSY = {"memory_budget": 0.8, "codecs": "paper", "solver": {"max_seconds": 30.0}}


AS = {
    "module": lambda block: block,
    "bound method": lambda block: block.forward,
    "closure": lambda block: lambda x: block(x),
    "partial": lambda block: functools.partial(block),
    "argument": lambda block: functools.partial(call, block),
    "object": lambda block: Caller(block),
}


def call(block, x):
    return block(x)


class Caller:
    def __init__(self, block):
        self.block = block

    def __call__(self, x):
        return self.block(x)


def step(work, callable_, seed=0, has_engine=True):
    torch.manual_seed(seed)
    x = torch.randn(2, 5, zoo.WIDTH, requires_grad=True)
    zoo.loss_of(work.checkpoint(callable_, x)).backward()
    if has_engine:
        work.controller.end_step()


@pytest.mark.matrix
@pytest.mark.parametrize("has_engine", [False, True], ids=["alone", "engine"])
@pytest.mark.parametrize("name", AS)
def test_weights_are_freed_with_their_model(name, has_engine, uncollected):
    for budget, model in ((0.8, zoo.GPTBlock), (1.0, zoo.EagerBlock)):  # the latter has a buffer
        work = Runtime(load({"adacc": {**LOSSLESS, "memory_budget": budget}}), has_engine=has_engine)
        assert_freed(work, AS[name], model, 1, has_engine)  # after the recording step
        assert_freed(work, AS[name], model, 2, has_engine)  # under a plan


def test_weights_are_freed_with_their_model_in_trials(uncollected):
    work = Runtime(load({"adacc": LOSSY}), has_engine=True)
    for steps in (1, 2, 3):
        assert_freed(work, AS["module"], zoo.GPTBlock, steps, True)


def assert_freed(work, make, model, steps, has_engine):
    block = model()
    weights = [weakref.ref(parameter) for parameter in block.parameters()]
    for seed in range(steps):
        step(work, make(block), seed, has_engine)
    del block
    assert not [weight for weight in weights if weight() is not None]


@pytest.mark.parametrize("section", [LOSSLESS, LOSSY], ids=["lossless", "lossy"])
def test_weights_are_freed_when_others_take_their_place(section, uncollected):
    work, block = Runtime(load({"adacc": section}), has_engine=True), zoo.GPTBlock()
    step(work, block)
    for seed in (1, 2, 3):
        weights = [weakref.ref(parameter) for parameter in (*block.fc1.parameters(), block.fc2.weight)]
        block.fc1 = nn.Linear(zoo.WIDTH, 4 * zoo.WIDTH)
        block.fc2.weight = nn.Parameter(block.fc2.weight.detach().clone())
        assert not [weight for weight in weights if weight() is not None]
        step(work, block, seed)


class Replacing(zoo.Tiny):
    """Puts another frozen weight in place at each forward."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Parameter(torch.rand(4, 4), requires_grad=False)

    def forward(self, x):
        x = super().forward(x @ self.frozen)
        self.frozen = nn.Parameter(self.frozen * 0.5, requires_grad=False)
        return x


class ReplacingLate(Replacing):
    """Puts another frozen weight in place before it uses it, once it is told to."""

    def forward(self, x, told):
        y = ((self.inner(x).sin() + 1).exp().cos() @ self.outer.weight.t()).sin()
        if told.item():
            self.frozen = nn.Parameter(self.frozen * 1.0, requires_grad=False)
        return (y @ self.frozen) * x


def test_a_weight_that_its_own_forward_replaces_lives_until_backward():
    work, block = Runtime(load({"adacc": LOSSLESS}), has_engine=True), Replacing()
    plain, served = copy.deepcopy(block), functools.partial(work.checkpoint, block)
    x = torch.randn(2, 4, requires_grad=True)
    for _ in range(3):
        expected, found = (torch.autograd.grad(run(x).sum(), x) for run in (plain, served))
        assert torch.equal(*expected, *found)


def test_a_call_under_a_plan_that_replaces_a_weight_diverges():
    work, block = Runtime(load({"adacc": {"memory_budget": 0.9, "codecs": "none"}}), has_engine=True), ReplacingLate()
    plain, served = copy.deepcopy(block), functools.partial(work.checkpoint, block)
    x = torch.randn(2, 4, requires_grad=True)
    for step in range(8):
        told = torch.tensor(float(step == 6))  # which tracks nothing
        expected, found = (torch.autograd.grad(run(x, told).sum(), x) for run in (plain, served))
        assert torch.equal(*expected, *found)
        work.controller.end_backward()
        work.controller.end_step()
    assert work.controller.plan is not None


def wave(x, weight, bias):
    return ((x @ weight).sin() + bias).exp().sin().cos().sin().cos().sin()


class Holding:
    def __init__(self, *held):
        self.held = held

    def __call__(self, x):
        return wave(x, *self.held)


OVER = {
    "closure": lambda weight, bias: lambda x: wave(x, weight, bias),
    "closure in a closure": lambda weight, bias: (lambda inner: lambda x: inner(x))(lambda x: wave(x, weight, bias)),
    "defaults": lambda weight, bias: lambda x, w=weight, b=bias: wave(x, w, b),
    "partial": lambda weight, bias: functools.partial(wave, weight=weight, bias=bias),
    "object": lambda weight, bias: Holding(weight, bias),
}


def bare_steps(work, make, has_engine, steps=3):
    """Weak references to parameters of no module, after some steps with a function that holds them."""
    torch.manual_seed(0)
    weight, bias = torch.nn.Parameter(torch.randn(8, 8)), torch.nn.Parameter(torch.randn(8))
    for _ in range(steps):
        gradients = []
        for run in (lambda function, x: function(x), work.checkpoint):
            x = torch.ones(4, 8, requires_grad=True)
            gradients.append(torch.autograd.grad(run(make(weight, bias), x).sum(), (x, weight, bias)))
        for one, other in zip(*gradients, strict=True):
            assert torch.equal(one, other)
        if has_engine:
            work.controller.end_step()
    return [weakref.ref(weight), weakref.ref(bias)]


@pytest.mark.parametrize("has_engine", [False, True], ids=["alone", "engine"])
@pytest.mark.parametrize("name", OVER)
def test_parameters_of_no_module_are_freed(name, has_engine, uncollected):
    for budget in (0.9, 1.0):
        work = Runtime(load({"adacc": {**LOSSLESS, "memory_budget": budget}}), has_engine=has_engine)
        for _ in range(2):  # a second model after the first, which is gone
            assert not [each for each in bare_steps(work, OVER[name], has_engine) if each() is not None]
        assert work.controller.plan is not None


class Keeping(logging.Handler):
    """Keeps all records, as the handlers of some services do."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


def test_a_runtime_is_freed_with_its_last_user(uncollected):
    runtime = Runtime(load({"adacc": LOSSLESS}))
    step(runtime, zoo.GPTBlock())
    gone = weakref.ref(runtime)
    del runtime
    assert gone() is None


@pytest.mark.parametrize("section", [LOSSLESS, LOSSY])
def test_steps_leave_nothing_to_the_collector(section, uncollected):
    """DeepSpeed's `disable_python_gc` turns it off for a whole run."""

    def steps():
        runtime, block = Runtime(load({"adacc": section}), has_engine=True), zoo.GPTBlock()
        for seed in range(6):
            step(runtime, block, seed)

    steps()  # Numba compiles in it
    gc.collect()
    steps()
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    garbage, gc.garbage[:] = [*gc.garbage], []
    assert [each for each in garbage if is_ours(each)] == []


def is_ours(thing):
    """Whether it is a tensor, or an object or function of ds_adacc. (torch.utils._pytree leaves some functions.)"""
    owner = thing.__module__ if type(thing) is types.FunctionType else type(thing).__module__
    return issubclass(type(thing), torch.Tensor) or owner.split(".")[0] == "ds_adacc"


def test_a_failed_planning_keeps_no_frames_alive(uncollected, monkeypatch):
    work, block, handler = Runtime(load({"adacc": LOSSLESS}), has_engine=True), zoo.GPTBlock(), Keeping()
    for seed in range(3):
        step(work, block, seed)
    logger = logging.getLogger("ds_adacc")
    logger.addHandler(handler)

    def fail(*args, **kwargs):
        raise planner.InfeasibleBudget(1 << 10, 1 << 20)

    class Local:
        pass

    def caller():
        local = Local()
        with monkeypatch.context() as patch:
            patch.setattr("ds_adacc.steps.planning.Planning.decide", fail)
            from ds_adacc.steps.after_step import _replan

            digest = next(iter(work.agreement.known_types))
            _replan(work.controller.planning, work.controller.step, [digest], "drift", {}, ())
        return weakref.ref(local)

    alive = caller()
    logger.removeHandler(handler)
    assert handler.records and alive() is None
