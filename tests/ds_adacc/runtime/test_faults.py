"""An exception in a block's forward or backward, in any step, leaves everything clean: the next step works."""

import functools
import itertools
import sys
import types

import pytest
import torch
import zoo
from fuzz.policies import HostTransfer
from recorded import call_of, offloading, profile_of, record, under
from storages import Storages
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import ds_adacc.program.replay
from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.engine.adacc import Adacc
from ds_adacc.engine.engine_methods import abandon_on_failure, end_backward, end_step, hooked
from ds_adacc.execute.host_offload import Prefetcher
from ds_adacc.kernels import make_codec
from ds_adacc.program.slots import keep, run_packed
from ds_adacc.python_watch.watch import Watch
from ds_adacc.record.capture import capture
from ds_adacc.record.follower import follow
from ds_adacc.runtime.find_blocks import find_blocks
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.runtime.wrap import wrap_blocks

SECTION = {"memory_budget": 0.7, "codecs": "none", "solver": {"max_seconds": 30.0}}
LAYERS, STEPS = 3, 5
ERRORS = (RuntimeError, KeyboardInterrupt)


class Fault(torch.autograd.Function):
    """An identity that saves its input; raises in backward if told to."""

    @staticmethod
    def forward(ctx, x, block):
        ctx.save_for_backward(x)
        ctx.block = block
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        where, error = FAULT.get(id(ctx.block), (None, None))
        if where == "backward":
            raise error("fault")
        return gradient + 0 * ctx.saved_tensors[0], None


class Faulty(zoo.GPTBlock):
    def forward(self, x):
        where, error = FAULT.get(id(self), (None, None))
        x = Fault.apply(self.ln1(x), self) + x
        x = super().forward(x)
        if where == "forward":
            raise error("fault")
        return x


FAULT = {}


@pytest.fixture(autouse=True)
def disarmed(uncollected):
    yield
    FAULT.clear()


class Engine:
    """What of a DeepSpeed engine is needed: backward and step, for each micro-batch."""

    monitor = types.SimpleNamespace(enabled=False)

    def __init__(self, model):
        self.model, self.global_steps = model, 0

    def backward(self, loss):
        loss.backward()
        self._backward_epilogue()

    def _backward_epilogue(self):
        pass

    def step(self):
        self.global_steps += 1

    def was_step_applied(self):
        return True

    def gradient_accumulation_steps(self):
        return 1


class Trainer:
    """Steps of a stack of blocks, under an engine or without one; with `section` None as plain autograd."""

    def __init__(self, section, has_engine=False):
        torch.manual_seed(1)
        self.model = nn.Sequential(*(Faulty() for _ in range(LAYERS)))
        self.engine, self.runtime = None, None
        if has_engine:
            self.engine = Engine(self.model)
            config, engine = load({"adacc": section}), self.engine
            self.runtime = runtime = Runtime(config, has_engine=True)
            wrap_blocks(find_blocks(self.model, "auto"), runtime)
            engine.adacc = Adacc(runtime)
            engine._backward_epilogue = hooked(engine, "_backward_epilogue", end_backward)
            engine.backward = hooked(engine, "backward", abandon_on_failure)
            engine.step = hooked(engine, "step", end_step)
        elif section is not None:
            self.runtime = Runtime(load({"adacc": section}))

    def forward(self, x):
        if self.engine is not None or self.runtime is None:
            return self.model(x)
        for block in self.model:
            x = self.runtime.checkpoint(block, x)
        return x

    def step(self, number, time=9):
        """The step's loss and gradients."""
        torch.manual_seed(100 + number)
        x = torch.randn(2, time, zoo.WIDTH, requires_grad=True)
        self.model.zero_grad()
        loss = zoo.loss_of(self.forward(x))
        if self.engine is None:
            loss.backward()
        else:
            self.engine.backward(loss)
            self.engine.step()
        return [loss.detach(), x.grad, *(p.grad for p in self.model.parameters())]

    def failing_step(self, number, where, error, layer, time=9):
        """The same, with a fault in one layer. Bytes that are still alive when the exception has been dealt with."""
        FAULT[id(self.model[layer])] = where, error
        with Storages() as storages:
            try:
                self.step(number, time)
            except error as raised:
                assert "fault" in str(raised)
            else:
                pytest.fail("no fault")
        FAULT.clear()
        self.model.zero_grad()
        return storages.alive()


def assert_clean():
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert _get_current_dispatch_mode_stack() == []
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch._C._is_multithreading_enabled()


@pytest.mark.matrix
@pytest.mark.parametrize("has_engine", [False, True], ids=["alone", "engine"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("at", "error"), [*((at, RuntimeError) for at in (1, 2, 4)), (2, KeyboardInterrupt)])
def test_next_step_is_as_if_nothing_had_happened(has_engine, error, where, at):
    plain, ours = Trainer(None), Trainer(SECTION, has_engine)
    for number in range(STEPS):
        if number + 1 == at:
            ours.failing_step(number, where, error, layer=at % LAYERS)
            assert_clean()
            if has_engine or where == "forward":
                assert not torch.autograd._profiler_enabled()
        zoo.assert_same(plain.step(number), ours.step(number))
    held = ours.runtime.controller.observation.held
    assert held is not None and held.planned == held.observed > 0
    assert ours.runtime.controller.plan.block_types[0].count == LAYERS


@pytest.mark.matrix
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("has_engine", [False, True], ids=["alone", "engine"])
def test_memory_of_a_failed_step_is_freed(has_engine, where):
    ours = Trainer(SECTION, has_engine)
    left = []
    for number in range(STEPS):
        ours.step(number)
        left.append(ours.failing_step(number, where, RuntimeError, layer=1))
    assert left[2:] == [0] * (STEPS - 2)


@pytest.mark.parametrize("has_engine", [False, True], ids=["alone", "engine"])
def test_a_shape_that_fails_in_its_first_forward_does_not_count(has_engine):
    ours = Trainer(SECTION, has_engine)
    ours.step(0)
    ours.failing_step(1, "forward", RuntimeError, layer=2, time=64)
    for number in range(2, 5):
        ours.step(number)
    assert all(len(group.block_types) == 1 for group in ours.runtime.controller.plan.groups)
    assert ours.runtime.controller.observation.held.planned == ours.runtime.controller.observation.held.observed


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_profiler_can_be_started_after_a_fault_in_a_metered_step(where):
    ours = Trainer(SECTION, has_engine=True)
    ours.step(0)
    assert ours.runtime.controller.step.observer is not None  # the next step is metered
    ours.failing_step(1, where, RuntimeError, layer=2)
    with torch.profiler.profile() as profile:
        ours.step(2)
    assert profile.events()


@pytest.mark.parametrize("error", ERRORS)
def test_a_fault_between_forward_and_backward_leaves_no_trace(error):
    ours, plain = Trainer(SECTION, has_engine=True), Trainer(None)
    for number in range(STEPS):
        with pytest.raises(error):
            ours.forward(torch.randn(2, 9, zoo.WIDTH, requires_grad=True))
            raise error("the data loader")
        assert_clean()
        zoo.assert_same(plain.step(number), ours.step(number))
    held = ours.runtime.controller.observation.held
    assert held.planned == held.observed


def interrupted(number, call, within):
    """Whether the call was interrupted: Python does so where a function in C returns.

    Here it is the one of this number that a function with the code `within` calls.
    """
    returns = itertools.count()

    def interrupt(frame, event, _):
        if event == "c_return" and frame.f_code is within and next(returns) == number:
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def test_after_an_interrupt_no_block_counts_as_running(caplog):
    work, block = Runtime(load({"adacc": SECTION})), zoo.GPTBlock()
    call = functools.partial(work.checkpoint, block, torch.randn(2, 9, zoo.WIDTH))
    for number in itertools.count():
        if not interrupted(number, call, Runtime.run.__code__):
            break
        call()
        assert work.recordings == 1
    assert number > 1 and "another thread" not in caplog.text


def test_an_interrupt_leaves_no_hooks():
    work, block = Runtime(load({"adacc": SECTION})), zoo.GPTBlock()
    call = functools.partial(work.checkpoint, block, torch.randn(2, 9, zoo.WIDTH))
    call()
    number = 0
    while interrupted(number, call, run_packed.__code__):
        assert_clean()
        number += 1
    assert number > 1


BEGINS = {"watch": (Watch, "start"), "hooks": (torch._C._autograd, "_push_saved_tensors_default_hooks")}


@pytest.mark.parametrize("is_followed", [False, True], ids=["recorded", "followed"])
@pytest.mark.parametrize("name", BEGINS)
def test_an_interrupt_ends_what_has_just_begun(name, is_followed, monkeypatch):
    (owner, function), (block, args, kwargs) = BEGINS[name], zoo.example("gpt")
    recording, call = record(block, args, kwargs), call_of(block, *args)
    begin = getattr(owner, function)

    def begin_interrupted(*given):
        begin(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, function, begin_interrupted)
    with pytest.raises(KeyboardInterrupt):
        follow(recording, call, keep, list) if is_followed else capture("block", call)
    assert sys.getprofile() is None
    assert_clean()


@pytest.mark.parametrize("error", ERRORS)
def test_a_fault_while_a_block_is_proven_leaves_the_random_state(monkeypatch, error):
    block, args, _ = zoo.example("gpt")

    def replay(op, *others):
        if op.short_name == "rand_like":
            torch.rand(3)
            raise error("fault")
        return ds_adacc.program.replay.replay(op, *others)

    noisy = nn.Sequential(block, Noisy())
    torch.manual_seed(4)
    noisy(*args)
    expected = torch.get_rng_state()
    torch.manual_seed(4)
    monkeypatch.setattr("ds_adacc.record.replayable.verify.replay", replay)
    try:
        capture("block", call_of(noisy, *args))
    except KeyboardInterrupt:
        assert error is KeyboardInterrupt
    assert torch.equal(expected, torch.get_rng_state())


class Noisy(nn.Module):
    def forward(self, x):
        return x * torch.rand_like(x)


@pytest.mark.parametrize("error", ERRORS)
def test_a_codec_that_fails_once(monkeypatch, error):
    block, args, kwargs = zoo.example("gpt")
    recording = record(block, args, kwargs)
    policy = planner.recompute_policy(profile_of(recording))
    codec = make_codec("group", backend="reference", group_size=16)
    run, _ = under(block, recording, planner.Policy(("group", *policy.stores[1:])), {0: codec})
    expected = zoo.gradients(block, args, kwargs, run)
    decompress = type(codec).decompress

    def failing(*arguments):
        monkeypatch.setattr(type(codec), "decompress", decompress)
        raise error("fault")

    torch.manual_seed(3)
    with Storages() as storages:
        loss = zoo.loss_of(run(*args, **kwargs))
        monkeypatch.setattr(type(codec), "decompress", failing)
        with pytest.raises(error, match="fault"):
            loss.backward(retain_graph=True)
        assert _get_current_dispatch_mode_stack() == [storages]
        block.zero_grad()
        args[0].grad = None
        loss.backward()
    parameters = dict(block.named_parameters())
    for name, gradient in expected[1].items():
        assert torch.equal(gradient, args[0].grad if name == "input" else parameters[name].grad)
    del loss, parameters, gradient
    block.zero_grad()
    args[0].grad = None
    assert storages.alive() == 0


class FailingTransfer(HostTransfer):
    """Fails once, in the copy named."""

    def __init__(self, where, error):
        self.where, self.error = where, error

    def __getattribute__(self, name):
        if name in ("out", "back", "take") and name == self.where:
            self.where = None
            raise self.error("fault")
        return super().__getattribute__(name)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("where", ["out", "back", "take"])
def test_a_copy_that_fails_once(where, error):
    block, args, kwargs = zoo.example("gpt")
    recording = record(block, args, kwargs)
    policy = offloading(recording, planner.retain_policy(profile_of(recording)))
    run, _ = under(block, recording, policy, prefetcher=Prefetcher(FailingTransfer(where, error)))
    with pytest.raises(error, match="fault"):
        zoo.gradients(block, args, kwargs, run)
    assert_clean()
    expected = zoo.gradients(block, args, kwargs)
    for _ in range(2):
        zoo.assert_same_bits(expected, zoo.gradients(block, args, kwargs, run))
