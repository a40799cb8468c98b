"""Calls that no plan decides on: plain, or checkpointed by torch where the program asks for that, to the bit."""

import itertools
import random
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
import zoo
from deepspeed.runtime.activation_checkpointing import checkpointing as deepspeeds
from experts import configured
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_adacc import checkpointing
from ds_adacc.checkpointing import checkpoint
from ds_adacc.config import load
from ds_adacc.engine.gradient_checkpointing import take_over_gradient_checkpointing
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.runtime.wrap import wrap_blocks

BY_TORCH = "runs under torch.utils.checkpoint in place of ds_adacc, as you ask for checkpointing: "
PLAINLY = "runs without ds_adacc, under plain autograd: "
CALLS = 3


@pytest.fixture(autouse=True)
def runtime():
    yield configured()
    checkpointing.registry.reset()


class Scripted(nn.Module):
    """A block that cannot be recorded, with dropout. `forwards`: how often its forward has run."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.GELU()), nn.Dropout(0.3), nn.Linear(8, 8))
        self._counter = itertools.count()  # a number would be watched, and is another at each call
        self.layers[0].register_forward_hook(self.count)

    def count(self, *_):
        next(self._counter)

    @property
    def forwards(self):
        return int(repr(self._counter).removeprefix("count(").removesuffix(")"))

    def forward(self, x, scale=1.0):
        return self.layers(x) * scale


class Quantizing(Scripted):
    """A block that turns out not to be recordable only when it is recorded."""

    def __init__(self):
        super().__init__()
        self.layers[1], self.scale = nn.GELU(), 1.0

    def forward(self, x):
        quantized = torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8).dequantize()
        return self.scale * self.layers(x) + quantized


def compare(block, ours, calls=CALLS):
    """Gradients of our calls have the bits of plain ones. Returns how often the forward ran in each."""
    args, ran = (torch.randn(2, 3, 8, requires_grad=True),), []
    for seed in range(calls):
        expected = zoo.gradients(block, args, {}, seed=seed)
        before = block.forwards
        zoo.assert_same_bits(expected, zoo.gradients(block, args, {}, ours, seed=seed))
        ran.append(block.forwards - before)
    return ran


def test_a_call_that_cannot_be_recorded_is_checkpointed_by_torch_if_the_program_asks(caplog):
    block = Scripted()
    assert compare(block, lambda x: checkpoint(block, x, scale=1.0)) == [2] * CALLS
    assert caplog.text.count(BY_TORCH + "it has a module of TorchScript") == 1
    assert PLAINLY not in caplog.text


def test_who_has_not_asked_is_told_how_to(runtime, caplog):
    block = Scripted()
    assert compare(block, lambda x: runtime.checkpoint(block, x)) == [1] * CALLS
    assert caplog.text.count(PLAINLY + "it has a module of TorchScript") == 1
    assert "To save memory there, call it by ds_adacc.checkpointing.checkpoint" in caplog.text


def test_a_block_of_which_a_recording_tells_too_little_is_checkpointed_from_its_second_call_on(caplog):
    block = Quantizing()
    assert compare(block, lambda x: checkpoint(block, x)) == [1, *[2] * (CALLS - 1)]
    assert caplog.text.count(BY_TORCH + "it handles a quantized tensor") == 1


@pytest.fixture
def two_ranks():
    """This process is one of two ranks, of which the other does nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_beside_other_ranks_a_call_is_not_checkpointed_for_what_it_brings_itself(two_ranks, caplog):
    """Data or lengths may make it so on this rank alone, and the others would not repeat its collectives."""
    block = Quantizing()
    assert compare(block, lambda x: checkpoint(block, x)) == [1] * CALLS
    assert PLAINLY + "it handles a quantized tensor" in caplog.text
    assert "To save memory" not in caplog.text
    block = Scripted()
    assert compare(block, lambda x: checkpoint(block, x)) == [2] * CALLS


def test_a_block_that_could_once_not_be_recorded_is_tried_again():
    runtime = configured(memory_budget=1.0)

    class Calibrating(Quantizing):
        def forward(self, x):
            return super().forward(x) if self.scale > 1 else self.layers(x)

    block = Calibrating()
    block.scale = 2.0
    assert compare(block, lambda x: checkpoint(block, x), 2) == [1, 2]
    block.scale = 1.0
    compare(block, lambda x: checkpoint(block, x), 2)
    assert any(variant.is_recorded for _, variant in runtime.blocks.variants())


def test_it_draws_the_same_of_python_and_numpy_too():
    class Drawing(Scripted):
        def forward(self, x):
            return self.layers(x) * random.random() * float(np.random.random())

    block, x = Drawing(), torch.randn(2, 3, 8, requires_grad=True)
    drawn = []
    for call in (block, lambda x: checkpoint(block, x)):
        random.seed(1)
        np.random.seed(1)
        drawn.append((zoo.gradients(block, (x,), {}, call), random.random(), float(np.random.random())))
    zoo.assert_same_bits(drawn[0][0], drawn[1][0])
    assert drawn[0][1:] == drawn[1][1:]


def test_it_draws_the_same_by_deepspeeds_tracker_too(caplog):
    class Forked(Scripted):
        def forward(self, x):
            with checkpointing.get_cuda_rng_tracker().fork("ours"):
                x = nn.functional.dropout(x, 0.5)
            return self.layers(x)

    tracker, block, args = deepspeeds.get_cuda_rng_tracker(), Forked(), (torch.randn(2, 3, 8, requires_grad=True),)
    own = tracker.get_states(), deepspeeds.get_accelerator
    tracker.reset()
    try:
        tracker.states_["ours"] = torch.Generator().manual_seed(5).get_state()
        before = tracker.get_states()
        expected = zoo.gradients(block, args, {})
        after = tracker.get_states()["ours"].clone()
        tracker.set_states(before)
        zoo.assert_same_bits(expected, zoo.gradients(block, args, {}, lambda x: checkpoint(block, x)))
        assert block.forwards == 3 and torch.equal(tracker.get_states()["ours"], after)
    finally:
        tracker.set_states(own[0])


def test_blocks_within_it_are_left_to_the_checkpoint(runtime, caplog):
    block, inner = Scripted(), zoo.GPTBlock()
    block.layers.append(nn.Linear(8, zoo.WIDTH))
    block.layers.append(inner)
    wrap_blocks({"inner": inner}, runtime)
    args = (torch.randn(2, 3, 8, requires_grad=True),)
    with torch.random.fork_rng():
        ours = zoo.gradients(block, args, {}, lambda x: checkpoint(block, x))
    assert block.forwards == 2 and runtime.recordings == 0
    plain = Scripted()
    plain.load_state_dict(block.state_dict(), strict=False)
    plain.layers.append(block.layers[-2])
    plain.layers.append(zoo.GPTBlock())
    plain.layers[-1].load_state_dict(inner.state_dict())
    zoo.assert_same_bits(ours, zoo.gradients(plain, args, {}))


def test_backward_may_run_twice():
    block, x = Scripted(), torch.randn(2, 3, 8, requires_grad=True)
    twice = []
    for call in (block, lambda x: checkpoint(block, x)):
        block.zero_grad()
        torch.manual_seed(3)
        loss = zoo.loss_of(call(x))
        loss.backward(retain_graph=True)
        loss.backward()
        twice.append([parameter.grad.clone() for parameter in block.parameters()])
    zoo.assert_same(*twice)


def test_a_block_of_another_engine_within_it_is_no_block_within_a_checkpoint_of_the_programs(caplog):
    """A teacher's, say, without gradients, in the forward of a student."""
    block, teacher = Scripted(), zoo.GPTBlock()
    wrap_blocks({"teacher": teacher}, Runtime(load({"adacc": {}})))
    block.layers[0].register_forward_hook(lambda *_: teach(teacher))
    assert compare(block, lambda x: checkpoint(block, x)) == [2] * CALLS


def teach(teacher):
    with torch.no_grad():
        teacher(torch.zeros(1, 2, zoo.WIDTH))


def test_a_cached_loss_is_checkpointed_within_its_backward(caplog):
    """GradCache: a hook on the embeddings runs the forward again, within the backward."""
    block = Scripted()
    block.layers[1] = nn.GELU()
    x = torch.randn(2, 3, 8)

    def gradients(run):
        block.zero_grad()
        before = block.forwards
        with torch.no_grad():
            embeddings = run(block, x).requires_grad_()

        def run_again(gradient):
            torch.manual_seed(7)
            with torch.enable_grad():
                again = run(block, x)
            again.backward(gradient)

        embeddings.register_hook(run_again)
        zoo.loss_of(embeddings).backward()
        return [parameter.grad.clone() for parameter in block.parameters()], block.forwards - before

    torch.manual_seed(3)
    expected, plainly = gradients(lambda block, x: block(x))
    torch.manual_seed(3)
    ours, asked = gradients(checkpoint)
    zoo.assert_same(expected, ours)
    assert (plainly, asked) == (2, 3)
    assert BY_TORCH + "it is called within a backward, as by cached losses" in caplog.text


def test_a_call_beside_one_of_another_thread_is_not_as_other_ranks_may_run_it_as_planned(caplog):
    is_inside, may_go = threading.Event(), threading.Event()

    def waits(x):
        is_inside.set()
        may_go.wait()
        return x.sin()

    other = threading.Thread(target=checkpoint, args=(waits, torch.randn(2, requires_grad=True)))
    other.start()
    is_inside.wait()
    block = Scripted()
    block.layers[1] = nn.GELU()
    try:
        assert compare(block, lambda x: checkpoint(block, x), 1) == [1]
    finally:
        may_go.set()
        other.join()
    assert PLAINLY + "another thread runs a block at the same time" in caplog.text


def test_where_saved_tensors_can_have_no_hooks_nothing_is_checkpointed(caplog):
    block = zoo.EagerBlock(dropout=0.0)
    x = torch.randn(2, 5, zoo.WIDTH)

    def gradient(run):
        return torch.func.grad(lambda x: zoo.loss_of(run(block, x)))(x)

    assert torch.equal(gradient(lambda block, x: block(x)), gradient(checkpoint))
    assert PLAINLY + "it is called within a transform of torch.func" in caplog.text
    assert "To save memory" not in caplog.text


def test_without_gradients_the_forward_runs_once():
    block = Scripted()
    with torch.no_grad():
        checkpoint(block, torch.randn(2, 3, 8))
    assert block.forwards == 1


class AsInTransformers(nn.Module):
    """The model has the function, as in diffusers and in code from the Hub; it may be given a method of the layer."""

    def __init__(self, given):
        super().__init__()
        self.layer, self.given = Scripted(), given
        self.gradient_checkpointing, self._gradient_checkpointing_func = False, None

    @property
    def forwards(self):
        return self.layer.forwards

    def enable_gradient_checkpointing(self):
        self.gradient_checkpointing, self._gradient_checkpointing_func = True, pytest.fail

    def forward(self, x):
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(self.given(self.layer), x)
        return self.layer(x)


@pytest.mark.parametrize(
    ("given", "asks"),
    [
        (lambda layer: layer, True),
        (lambda layer: layer.__call__, True),
        (lambda layer: lambda x: layer(x), False),  # which layers such a function runs is not known
    ],
    ids=["layer", "method", "function"],
)
def test_a_models_checkpoint_function_asks_for_the_layer_that_it_is_given(given, asks, runtime):
    model = AsInTransformers(given)
    wrap_blocks({"layer": model.layer}, runtime)
    take_over_gradient_checkpointing(model, ["layer"])
    assert compare(model, model) == [1] * CALLS
    model.enable_gradient_checkpointing()
    assert compare(model, model) == [2 if asks else 1] * CALLS
    model.eval()
    assert compare(model, model) == [1] * CALLS


def test_the_last_that_it_saves_may_be_saved_within_torchscript():
    """Torch ends a second forward by an exception where the last tensor is saved, unless it is told not to."""

    class EndsInIt(Scripted):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.GELU())))
            self.layers[0].register_forward_hook(self.count)

    block = EndsInIt()
    assert compare(block, lambda x: checkpoint(block, x)) == [2] * CALLS


def test_a_block_of_which_all_ranks_run_a_second_forward_must_be_recorded(runtime):
    block = Quantizing()
    runtime.agreement.repeated = frozenset({"Quantizing"})
    with pytest.raises(RuntimeError, match=r"on this rank a call of it cannot be recorded: it handles a quantized"):
        checkpoint(block, torch.randn(2, 8, requires_grad=True))
