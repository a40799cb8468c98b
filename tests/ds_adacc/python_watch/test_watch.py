"""What Python reads while a block is recorded, and what follows from it."""

import builtins
import concurrent.futures
import contextlib
import cProfile
import functools
import glob
import inspect
import logging
import os
import queue
import random
import sys
import tempfile
import threading
import time
import types
import uuid
import weakref
from pathlib import Path

import contourpy
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
from recomputing import recomputing
from recorded import call_of, record
from torch import nn
from torch._dynamo.callback import CallbackTrigger, callback_handler
from torch.nn.utils import rnn

from ds_adacc.config import load
from ds_adacc.python_watch.listener import Listener
from ds_adacc.python_watch.watch import Watch
from ds_adacc.record.capture import capture
from ds_adacc.runtime.runtime import Runtime

factor, factors = 1.0, [1.0]
round_number = 0  # a global with the name of an attribute


class Block(nn.Module):
    """Reads one number on the way; `number` says how."""

    def __init__(self, number):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(zoo.WIDTH, zoo.WIDTH), nn.Linear(zoo.WIDTH, zoo.WIDTH)
        self.number = number

    def forward(self, x):
        early = F.gelu(self.fc1(x))
        return self.fc2(F.gelu(early * self.number(x.detach())))


def batch():
    return torch.randn(2, 3, zoo.WIDTH, requires_grad=True)


DATA = {
    "tolist": lambda x: x.tolist()[0][0][0],
    "numpy": lambda x: float(x.numpy()[0, 0, 0]),
    "asarray": lambda x: float(np.asarray(x).sum()),
    "array": lambda x: float(x.__array__().sum()),
    "dlpack": lambda x: float(np.from_dlpack(x).sum()),
    "to_dlpack": lambda x: len(str(torch.utils.dlpack.to_dlpack(x))),
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.sum() * 5),
    "bool": lambda x: 2.0 if x.sum() > 0 else 3.0,
    "format": lambda x: float(f"{x.sum()}"),
    "range": lambda x: len(range((x.sum().abs() * 5).to(torch.int64))),
    "tensor_split": lambda x: 1 + len(torch.tensor_split(x[0, 0], positives(x[0, 0])[None])[0]),
    "method tensor_split": lambda x: 1 + len(x[0, 0].tensor_split(positives(x[0, 0])[None])[0]),
    "pack": lambda x: len(rnn.pack_padded_sequence(x, positives(x[..., 0]).clamp(1), True, False).data),
    "pad": lambda x: 1 + float(torch._VF._pad_packed_sequence(x[0], sizes(x), False, 0.0, 2)[0].shape[1]),
    "reshape": lambda x: len(torch._reshape_from_tensor(x[0, 0, :6], factors_of_six(x))),
    "apply": lambda x: x.clone().apply_(lambda v: 1.0 if v > 0 else 0.25),
    "map": lambda x: torch.zeros_like(x).map_(x, lambda _, v: 1.0 if v > 0 else 0.25),
    "seed": lambda x: 1 + torch.initial_seed() % 7,
    "seed of a generator": lambda x: 1 + torch.default_generator.initial_seed() % 7,
    "another thread": lambda x: (Sum(x).start(), Sum.done.get())[1],
    "a thread that waits": lambda x: waiting.submit(lambda: x.sum().item()).result(),
}
waiting = concurrent.futures.ThreadPoolExecutor(1)
waiting.submit(int).result()  # its thread has begun


def positives(x):
    """How many there are along the last dimension, at most as many as `x` has rows."""
    return (x > 0).sum(-1).clamp(max=3)


def sizes(x):
    """Two numbers that data decide; their sum is 3."""
    return torch.where(x.sum() > 0, torch.tensor([2, 1]), torch.tensor([3, 0]))


def factors_of_six(x):
    return torch.where(x.sum() > 0, torch.tensor([2, 3]), torch.tensor([3, 2]))


class Sum(threading.Thread):
    done = queue.SimpleQueue()

    def __init__(self, x):
        super().__init__()
        self.x = x

    def run(self):
        self.done.put(self.x.sum().item())


@pytest.mark.parametrize("name", DATA)
def test_what_follows_from_data_is_not_recomputed(name):
    block = Block(DATA[name])
    recording = record(block, (batch(),), {})
    ops, (remark,) = recording.ops, recording.remarks_on_replays
    line = DATA[name].__code__.co_firstlineno
    assert remark.startswith(f"test_watch.py:{line} (<lambda>) reads data into Python, or makes a shape that")
    mul = max(op.index for op in ops if op.short_name == "mul")
    assert [op.replayable for op in ops if op.index >= mul] == [False] * (len(ops) - mul)
    assert all(op.replayable for op in ops if op.short_name in ("addmm", "gelu") and op.index < mul - 3)
    work = recomputing()
    for seed in range(4):
        torch.manual_seed(seed)
        x = batch()
        zoo.assert_exact(block, (x,), {}, lambda x: work.checkpoint(block, x))


def inverse(x):
    return torch.linalg.inv(x[0, :, :3])


def inverse_if_any(x):
    try:
        return inverse(x).sum() * x
    except torch.linalg.LinAlgError:
        return x.cos()


def inverse_or_one(x):
    try:
        return inverse(x).sum() * x
    except:  # noqa: E722
        return x.cos()


def inverse_or_none(x):
    with contextlib.suppress(torch.linalg.LinAlgError):
        return inverse(x).sum() * x
    return x.cos()


@pytest.mark.parametrize("first", [1.0, 0.0], ids=["first there is an inverse", "first there is none"])
@pytest.mark.parametrize("number", [inverse_if_any, inverse_or_one, inverse_or_none])
def test_nothing_after_an_error_that_the_block_may_catch_is_recomputed(number, first):
    work, block = recomputing(), Block(lambda x: number(x * block.factor))
    for factor in (first, 1.0 - first):
        block.factor = torch.tensor(factor)  # not a number that is read
        x = batch()
        zoo.assert_exact(block, (x,), {}, functools.partial(work.checkpoint, block))
    assert work.recordings == 1


def test_an_error_that_no_block_catches_tells_nothing_of_data():
    assert all(op.replayable for op in record(Block(lambda x: inverse(x).sum()), (batch(),), {}).ops)


def clock():
    return time.monotonic() % 1


def jitter():
    return np.random.rand()


jitter_of_library = types.FunctionType(jitter.__code__, {"np": np, "__name__": "torch.augmentation"})
UNGUARDED = {
    "random.random": lambda x: random.random(),
    "random.uniform": lambda x: random.uniform(1, 2),
    "numpy.random": lambda x: float(np.random.rand()),
    "numpy.random by a library": lambda x: jitter_of_library(),
    "time.monotonic": lambda x: clock(),
    "posix.stat by os.path.exists": lambda x: 2.0 if os.path.exists(__file__) else 1.0,
    "posix.stat by Path.exists": lambda x: 2.0 if Path(__file__).exists() else 1.0,
    "posix.stat by os.path.getsize": lambda x: os.path.getsize(__file__) / 1e5,
    "io.open by read_text": lambda x: len(Path(__file__).read_text()) / 1e5,
    "posix.lstat by glob": lambda x: float(len(glob.glob(__file__))),
    "posix.urandom by uuid4": lambda x: uuid.uuid4().int % 7 / 7,
    "sys._getframe": lambda x: float(sys._getframe(1).f_lineno),
    "sys._getframe by inspect": lambda x: float(inspect.currentframe().f_back.f_lineno),
}


@pytest.mark.parametrize("name", UNGUARDED)
def test_nothing_is_recomputed_beside_numbers_that_no_guard_can_read(name, caplog):
    work, block = recomputing(), Block(UNGUARDED[name])
    with caplog.at_level(logging.WARNING, logger="ds_adacc"):
        for _ in range(3):
            zoo.gradients(block, (batch(),), {}, lambda x: work.checkpoint(block, x))
    assert work.recordings == 1
    ((_, found),) = work.blocks.variants()
    assert not any(op.replayable for op in found.bound.recording.ops)
    (warning,) = [line for line in caplog.messages if "cannot watch" in line]
    assert name.partition(".")[0] in warning


def test_a_path_that_is_put_together_and_a_line_of_the_log_read_nothing(monkeypatch):
    monkeypatch.setenv("OF_A_BLOCK", "0")

    def number(x):
        os.environ["OF_A_BLOCK"] = "1"
        logging.getLogger(__name__).error("at %s", os.path.join(os.path.dirname(__file__), "models"))
        return float(len((Path("a") / "b").parts))

    work, block = recomputing(), Block(number)
    zoo.gradients(block, (batch(),), {}, functools.partial(work.checkpoint, block))
    assert not any(variant.doubt for _, variant in work.blocks.variants())


def test_random_names_of_temporary_files_are_no_numbers_of_the_block(tmp_path):
    """Triton's compiler writes some, when a kernel first runs."""
    files = tempfile._RandomNameSequence()  # as a new process has it
    block = Block(lambda x: float(len(next(files))))
    captured = capture("block", call_of(block, batch()))
    assert captured.watch.unguarded is None


@torch.library.custom_op("ds_adacc_tests::scaled_by_reading", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * factor


scaled.register_fake(torch.empty_like)
scaled.register_autograd(lambda ctx, gradient: gradient * factor)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_what_an_operator_in_a_compiled_graph_reads_is_guarded(is_compiled):
    """What torch's compilers read is no part of the block; what they have compiled reads for it."""
    block = Block(lambda x: 2.0)
    compiled = torch.compile(lambda x: scaled(block(x)).sin())
    if is_compiled:
        compiled(batch())
    captured = capture("block", call_of(block, batch())._replace(run=functools.partial(compiled, batch())))
    assert f"{__name__}.factor" in captured.watch.reads.places


@pytest.mark.parametrize("thread", ["this one", "another one"])
def test_compilation_is_not_watched_call_by_call(thread):
    """It makes millions of calls, none of them the block's. Those that another thread compiles are none of ours."""
    told, profilers, block = [], [], Block(lambda x: 2.0)

    def backend(graph, inputs):
        profilers.append(sys.getprofile())
        return graph

    def run(x):
        compiled = torch.compile(block, backend=backend)
        if thread == "this one":
            output = compiled(x)
        else:
            other = threading.Thread(target=compiled, args=(x.detach(),))
            other.start()
            other.join()
            output = block(x)
        told.append(sys.getprofile())
        return output

    captured = capture("block", call_of(block, batch())._replace(run=functools.partial(run, batch())))
    assert profilers == [None]
    assert told == [captured.watch._on_event] and sys.getprofile() is None
    assert callback_handler.start_callbacks == callback_handler.end_callbacks == []


DRAWS = {
    "in a helper that Dynamo inlines": lambda: torch.compile(Drawing(), backend="aot_eager"),
    "where Dynamo is off": lambda: Block(lambda x: rolled()),
}
rolled = torch.compiler.disable(random.random)


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(zoo.WIDTH, zoo.WIDTH)

    def forward(self, x):
        return times(torch.relu(self.fc(x)), drawn()).sin()


def drawn():
    return random.randint(2, 9)


@torch.compiler.disable
def times(x, number):
    return (x * number).exp()


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_that_dynamo_draws_for_the_block_cannot_be_guarded(name):
    block = DRAWS[name]()
    captured = capture("block", call_of(block, batch()))
    assert captured.watch.unguarded.startswith("random.")


@pytest.mark.parametrize("ours_is_first", [True, False])
def test_another_thread_compiles_meanwhile(ours_is_first):
    """Torch tells when the first of several compilations begins, and when the last one ends, in whatever thread."""
    ours, theirs = contextlib.ExitStack(), contextlib.ExitStack()

    def elsewhere(work):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    def begin_ours():
        ours.enter_context(callback_handler.install_callbacks(CallbackTrigger.LAZY_BACKWARD, "0/0"))

    def begin_theirs():
        elsewhere(lambda: theirs.enter_context(callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "1/0")))

    def number(x):
        for begin in (begin_ours, begin_theirs) if ours_is_first else (begin_theirs, begin_ours):
            begin()
        for end in (
            (ours.close, lambda: elsewhere(theirs.close))
            if ours_is_first
            else (
                lambda: elsewhere(theirs.close),
                ours.close,
            )
        ):
            end()
        return of_global(x)

    block = Block(number)
    captured = capture("block", call_of(block, batch()))
    is_watched = f"{__name__}.factor" in captured.watch.reads.places
    assert is_watched or captured.watch.unguarded == "what it has run while another thread compiled"
    assert sys.getprofile() is None


def test_a_block_that_resets_dynamo():
    """This forgets whom it tells that it compiles."""
    block = Block(lambda x: torch._dynamo.reset() or 2.0)
    captured = capture("block", call_of(block, batch()))
    assert captured.recording is not None and sys.getprofile() is None


def of_global(x):
    return factor


def of_builtins(x):
    return factor_of_all  # noqa: F821


def of_list(x):
    return helper() * 2


def helper():
    return factors[0]


class Twice(torch.autograd.Function):
    """A class whose `apply` is that of torch, and which has a static method with a default that may change."""

    @staticmethod
    def forward(ctx, x, factors=factors):
        return 2 * factors[0] * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2 * factors[0]


def of_function(x):
    return Twice.apply(x)


@pytest.mark.parametrize("number", [of_global, of_builtins, of_list, of_function])
def test_a_global_may_change(number, monkeypatch):
    global factor
    work, block = recomputing(), Block(number)
    for value in (1.0, 1.0, 3.0, 3.0):
        factor = factors[0] = value
        monkeypatch.setattr(builtins, "factor_of_all", value, raising=False)
        x = batch()
        zoo.assert_exact(block, (x,), {}, lambda x: work.checkpoint(block, x))
    assert work.recordings == 2


def by_name(x):
    try:
        return coming
    except NameError:
        return 1.0


settings = types.ModuleType("settings_of_a_user")
COMING = {
    "member": (lambda x: getattr(settings, "coming", 1.0), settings),
    "member, asked for": (lambda x: 3.0 if hasattr(settings, "coming") else 1.0, settings),
    "global": (lambda x: globals().get("coming", 1.0), sys.modules[__name__]),
    "global, by its name": (by_name, sys.modules[__name__]),
}


@pytest.mark.parametrize("what", [3.0, None])
@pytest.mark.parametrize("name", COMING)
def test_what_is_not_there_may_come(name, what, monkeypatch):
    number, module = COMING[name]
    work, block = recomputing(), Block(lambda x: number(x) or 2.0)
    for step in range(4):
        if step == 2:
            monkeypatch.setattr(module, "coming", what, raising=False)
        x = batch()
        zoo.assert_exact(block, (x,), {}, lambda x: work.checkpoint(block, x))
    assert work.recordings == 2


@pytest.mark.parametrize("calls", (False, True))
def test_two_python_modules_of_one_name_are_told_apart(calls):
    """A function of each reads a global, or the block reads it itself."""
    first, second = (types.ModuleType("settings") for _ in range(2))
    for number, each in enumerate((first, second)):
        exec(f"factor = 1.0\ndef scaled(): return factor + {number}", each.__dict__)

    def use(x):
        return first.scaled() * second.scaled() if calls else first.factor * second.factor

    work, block = recomputing(), Block(use)
    for factor in (1.0, 3.0):
        second.factor = factor
        x = batch()
        zoo.assert_exact(block, (x,), {}, lambda x: work.checkpoint(block, x))
    assert work.recordings == 2


def test_pythons_own_builtins_are_no_places():
    work = recomputing()
    block = Block(lambda x: float(len((open, exit, NotImplemented, Ellipsis, ValueError, __import__, print))))
    zoo.gradients(block, (batch(),), {}, functools.partial(work.checkpoint, block))
    (known,) = work.blocks.all()
    assert not any("builtins" in place for place in known.places)


def test_a_block_is_not_recorded_while_a_profiler_watches_pythons_calls(caplog):
    work, block, told = recomputing(), Block(lambda x: 2.0), []

    def profiler(frame, event, argument):
        told.append(event)

    sys.setprofile(profiler)
    try:
        zoo.gradients(block, (batch(),), {}, lambda x: work.checkpoint(block, x))
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert told and work.recordings == 0
    assert "profiler" in caplog.text
    zoo.gradients(block, (batch(),), {}, lambda x: work.checkpoint(block, x))
    assert work.recordings == 1 and sys.getprofile() is None


def test_cprofile_around_a_step_is_left_alone():
    work, block = recomputing(), Block(lambda x: 2.0)
    with cProfile.Profile() as profile:
        zoo.gradients(block, (batch(),), {}, lambda x: work.checkpoint(block, x))
    assert any("forward" in entry.code.co_name for entry in profile.getstats() if hasattr(entry.code, "co_name"))


def test_the_watch_ends_with_a_block_that_raises():
    def fail(x):
        raise ValueError("out of luck")

    work = recomputing()
    with pytest.raises(ValueError, match="out of luck"):
        work.checkpoint(Block(fail), batch())
    assert sys.getprofile() is None


class Numbered(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.round_number = nn.Linear(zoo.WIDTH, zoo.WIDTH), 2.0

    def forward(self, x):
        return F.gelu(self.fc(x)) * self.round_number


@pytest.mark.parametrize("as_function", [False, True])
def test_an_attribute_is_not_taken_for_a_global_of_its_name(as_function, monkeypatch):
    block = Numbered()
    runtime = Runtime(load({"adacc": {"memory_budget": 1.0, "codecs": "none"}}))
    for number in range(5):
        monkeypatch.setattr(sys.modules[__name__], "round_number", number)
        if as_function:
            output = runtime.checkpoint(lambda x: F.gelu(block.fc(x)) * block.round_number, batch())
        else:
            output = runtime.checkpoint(block, batch())
        output.sum().backward()
    assert runtime.recordings == 1
    assert not any("round_number" in name for each in runtime.blocks.all() for name in each.places)


def test_an_extension_in_c_plus_plus_may_get_addresses():
    """Torch's own functions are bound likewise."""
    told = []

    class Told(Listener):
        def note_address(self, tensor):
            told.append(tensor)

    watch = Watch(Told())
    watch.start()
    torch._C._get_tracing_state()
    assert not told
    contourpy.max_threads()
    watch.stop()
    assert told == [None]


def test_a_watch_that_was_not_started_lets_go_of_its_listener_too(uncollected):
    class Holding(Listener):
        def __init__(self):
            self.watch = Watch(self)

    listener = Holding()
    listener.watch.stop()
    reference = weakref.ref(listener)
    del listener
    assert reference() is None
