"""What the program puts around a block: its own hooks, other checkpointing, torch.func, forward mode, lazy modules."""

import functools
import logging
import threading

import pytest
import torch
import torch.distributed as dist
import zoo
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from ds_adacc.config import load
from ds_adacc.engine.adacc import Adacc
from ds_adacc.execute.input_placement import InputPlacement
from ds_adacc.runtime import runtime as room
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.runtime.wrap import wrap_blocks

SECTION = {"memory_budget": 0.8, "codecs": "none", "solver": {"max_seconds": 30.0}}
LOSSY = {"memory_budget": 0.9, "codecs": "auto", "solver": {"max_seconds": 30.0}}
STEPS = 4


def plain(block, x):
    return block(x)


def train(call, around, runtime=None, make=zoo.GPTBlock):
    """The gradients of some steps of two blocks; `call` runs one of them, `around` runs both."""
    torch.manual_seed(0)
    blocks, seen = nn.ModuleList([make(), make()]), []
    for seed in range(STEPS):
        torch.manual_seed(seed)
        x = torch.randn(2, 5, zoo.WIDTH, requires_grad=True)

        def both(x):
            for block in blocks:
                x = call(block, x)
            return x

        blocks.zero_grad()
        zoo.loss_of(around(both, x)).backward()
        if runtime is not None:
            runtime.controller.end_step()
        seen.append([x.grad, *(p.grad.clone() for p in blocks.parameters())])
    return seen


class Seen:
    """Hooks that note what they are given."""

    def __init__(self):
        self.packed, self.unpacked = [], []

    def pack(self, tensor):
        self.packed.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, tensor.clone()))
        return tensor

    def unpack(self, tensor):
        self.unpacked.append(tensor.detach().clone())
        return tensor

    def around(self, both, x):
        with saved_tensors_hooks(self.pack, self.unpack):
            return both(x)


@pytest.mark.parametrize("section", [SECTION, LOSSY], ids=["none", "auto"])
@pytest.mark.parametrize("has_engine", [False, True], ids=["alone", "engine"])
def test_hooks_around_a_block_see_what_they_see_without_us(section, has_engine):
    work = Runtime(load({"adacc": section}), has_engine=has_engine)
    alone, ours = Seen(), Seen()
    expected = train(plain, alone.around)
    zoo.assert_same(expected, train(work.checkpoint, ours.around, runtime=work if has_engine else None))
    for a, b in zip(alone.packed, ours.packed, strict=True):
        assert a[:-1] == b[:-1] and torch.equal(a[-1], b[-1])
    zoo.assert_same(alone.unpacked, ours.unpacked)


def on_cpu(both, x):
    with save_on_cpu():
        return both(x)


def without_hooks(both, x):
    with disable_saved_tensors_hooks("none here"):
        return both(x)


AROUND = {
    "save_on_cpu": on_cpu,
    "not reentrant": functools.partial(checkpoint, use_reentrant=False),
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "disabled hooks": without_hooks,
}


@pytest.mark.parametrize("has_engine", [False, True], ids=["alone", "engine"])
@pytest.mark.parametrize("name", AROUND)
def test_gradients_within_other_checkpointing(name, has_engine):
    work = Runtime(load({"adacc": SECTION}), has_engine=has_engine)
    around = AROUND[name]
    if "reentrant" in name:  # before anything is recorded it would be refused
        train(work.checkpoint, lambda both, x: both(x), runtime=work if has_engine else None)
    zoo.assert_same(train(plain, around), train(work.checkpoint, around, runtime=work if has_engine else None))


def gradient(run, block, x):
    return torch.func.grad(lambda x: zoo.loss_of(run(block, x)))(x)


def of_parameters(run, block, x):
    named = dict(block.named_parameters())
    return torch.func.grad(lambda p: zoo.loss_of(torch.func.functional_call(Called(run, block), p, (x,))))(
        {f"block.{name}": p.detach() for name, p in named.items()}
    )["block.proj.weight"]


class Called(nn.Module):
    def __init__(self, run, block):
        super().__init__()
        self.run, self.block = run, block

    def forward(self, x):
        return self.run(self.block, x)


def jvp(run, block, x):
    return torch.func.jvp(lambda x: run(block, x), (x,), (torch.ones_like(x),))[1]


def vmapped(run, block, x):
    return torch.func.vmap(lambda x: run(block, x[None])[0])(x)


def per_sample(run, block, x):
    return torch.func.vmap(torch.func.grad(lambda x: zoo.loss_of(run(block, x[None]))))(x)


def dual(run, block, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(run(block, forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def traced(run, block, x):
    return torch.jit.trace(Called(run, block), x, check_trace=False)(x)


def traced_by_fx(run, block, x):
    return make_fx(functools.partial(run, block))(x)(x)


TRANSFORMS = (gradient, of_parameters, jvp, vmapped, per_sample, dual, traced, traced_by_fx)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_run_plain_with_one_warning(transform, caplog):
    work, block = Runtime(load({"adacc": SECTION})), zoo.EagerBlock(dropout=0.0)
    x = torch.randn(2, 5, zoo.WIDTH)
    with caplog.at_level(logging.WARNING, logger="ds_adacc"):
        for _ in range(2):
            assert torch.equal(transform(plain, block, x), transform(work.checkpoint, block, x))
    assert len([line for line in caplog.messages if "plain autograd" in line]) == 1
    assert work.recordings == 0
    leaf = x.requires_grad_()
    zoo.assert_exact(block, (leaf,), {}, lambda x: work.checkpoint(block, x))
    assert work.recordings == 1


def test_a_lazy_module_is_recorded_once_it_has_its_parameters(caplog):
    torch.manual_seed(0)
    work, block = Runtime(load({"adacc": SECTION}), has_engine=True), nn.Sequential(nn.LazyLinear(8), nn.GELU())
    x = torch.randn(2, 5, requires_grad=True)
    with caplog.at_level(logging.WARNING, logger="ds_adacc"):
        zoo.loss_of(work.checkpoint(block, x)).backward()
    assert work.recordings == 0 and "lazy" in caplog.text
    for _ in range(2):
        zoo.assert_exact(block, (x,), {}, lambda x: work.checkpoint(block, x))
    assert work.recordings == 1


@pytest.fixture
def mesh():
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_block_whose_parameters_are_sharded_by_torch_runs_under_plain_autograd(mesh, caplog):
    """With several ranks, `fully_shard` frees them at the end of the forward, before its values are looked at."""
    torch.manual_seed(0)
    work, block = Runtime(load({"adacc": SECTION}), has_engine=True), zoo.GPTBlock()
    fully_shard(block, mesh=mesh)
    x = torch.randn(2, 5, zoo.WIDTH, requires_grad=True)
    seen = []
    for call in (block, lambda x: work.checkpoint(block, x)) * 2:
        torch.manual_seed(1)
        block.zero_grad()
        zoo.loss_of(call(x)).backward()
        seen.append([x.grad.clone(), *(p.grad.full_tensor() for p in block.parameters())])
        x.grad = None
    assert all(torch.equal(a, b) for other in seen[1:] for a, b in zip(seen[0], other, strict=True))
    assert work.recordings == 0
    assert "its parameters are of type DTensor, as fully_shard (FSDP2)" in caplog.text


def waiting():
    """A function to checkpoint that waits; what it sets when it is inside, and what it waits for."""
    is_inside, may_go = threading.Event(), threading.Event()

    def waits(x):
        is_inside.set()
        may_go.wait()
        return x.sin()

    return waits, is_inside, may_go


def test_of_two_threads_whose_calls_begin_at_once_one_runs_without(monkeypatch, caplog):
    """The other thread is first, though it comes after this one has looked whether a block runs."""
    runtime, block = Runtime(load({"adacc": SECTION})), zoo.GPTBlock()
    waits, is_inside, may_go = waiting()

    x = torch.randn(2, 5, zoo.WIDTH, requires_grad=True)
    expected = zoo.gradients(block, (x,), {})
    other = threading.Thread(target=runtime.checkpoint, args=(waits, torch.randn(2, 5, requires_grad=True)))
    look = room.why_unrecordable

    def looks(tensors):
        monkeypatch.setattr(room, "why_unrecordable", look)
        other.start()
        is_inside.wait()
        return look(tensors)

    monkeypatch.setattr(room, "why_unrecordable", looks)
    zoo.assert_same_bits(expected, zoo.gradients(block, (x,), {}, lambda x: runtime.checkpoint(block, x)))
    may_go.set()
    other.join()
    assert runtime.recordings == 1 and "another thread runs a block at the same time" in caplog.text


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Scripting(nn.Module):
    """Its first forward makes a module of TorchScript. After that it calls a Function that refers to another module."""

    def __init__(self):
        super().__init__()
        self.linear, self.forwards = nn.Linear(zoo.WIDTH, zoo.WIDTH), 0

    def forward(self, x):
        self.forwards += 1
        if not hasattr(self, "scripted"):
            self.scripted = torch.jit.script(nn.GELU())
        linear = self.linear

        class Applied(Doubled):
            @staticmethod
            def forward(ctx, x):
                return Doubled.forward(ctx, linear(x).detach())

        return self.scripted(Applied.apply(self.linear(x)))


def test_a_forward_that_makes_a_module_of_torchscript_runs_once():
    runtime, block = Runtime(load({"adacc": {**SECTION, "memory_budget": 1.0}})), Scripting()
    for forwards in (1, 2):
        x = torch.randn(2, 5, zoo.WIDTH, requires_grad=True)
        zoo.loss_of(runtime.checkpoint(block, x)).backward()
        assert block.forwards == forwards


@pytest.mark.parametrize("section", [SECTION, LOSSY])
def test_a_tensor_of_inference_mode_among_the_arguments(section, caplog):
    runtime, block = Runtime(load({"adacc": section})), zoo.GPTBlock()
    with torch.inference_mode():
        shift = torch.randn(5, zoo.WIDTH)

    def shifted(x, shift):
        return block(Doubled.apply(x) + shift)

    for _ in range(2):
        x = torch.randn(2, 5, zoo.WIDTH, requires_grad=True)
        zoo.assert_same_bits(
            zoo.gradients(block, (x,), {}, lambda x: shifted(x, shift)),
            zoo.gradients(block, (x,), {}, lambda x: runtime.checkpoint(shifted, x, shift)),
        )
    assert "an argument was made within torch.inference_mode" in caplog.text


def test_a_parameter_of_inference_mode(caplog):
    runtime, block = Runtime(load({"adacc": LOSSY})), zoo.GPTBlock()
    with torch.inference_mode():
        block.shift = nn.Parameter(torch.randn(zoo.WIDTH), requires_grad=False)

    def shifted(x):
        return block(x + block.shift)

    for _ in range(2):
        x = torch.randn(2, 5, zoo.WIDTH, requires_grad=True)
        plain, mine = (
            zoo.gradients(block.fc1, (x,), {}, call)
            for call in (shifted, functools.partial(runtime.checkpoint, shifted))
        )
        zoo.assert_same_bits(plain, mine)
    assert "its parameter shift was made within torch.inference_mode" in caplog.text


def test_a_block_that_runs_while_another_thread_runs_one_is_told_of(caplog):
    runtime, block = Runtime(load({"adacc": SECTION})), zoo.GPTBlock()
    waits, is_inside, may_go = waiting()

    def batch():
        return torch.randn(2, 5, zoo.WIDTH, requires_grad=True)

    other = threading.Thread(target=runtime.checkpoint, args=(waits, batch()))
    other.start()
    is_inside.wait()
    x = batch()
    zoo.assert_exact(block, (x,), {}, lambda x: runtime.checkpoint(block, x))
    may_go.set()
    other.join()
    assert "without ds_adacc, under plain autograd: another thread runs a block at the same time" in caplog.text
    runtime.checkpoint(block, batch()).sum().backward()
    assert runtime.recordings == 2


def test_a_block_beside_one_of_another_thread_is_an_error_where_ranks_share_inputs():
    runtime = Runtime(load({"adacc": SECTION}))
    waits, is_inside, may_go = waiting()
    other = threading.Thread(
        target=runtime.checkpoint, args=(waits, torch.randn(2, 5, requires_grad=True)), daemon=True
    )
    other.start()
    is_inside.wait()
    runtime.agreement.inputs = InputPlacement(group=object())
    with pytest.raises(RuntimeError, match=r"another thread runs a block at the same time.*partition_activations"):
        runtime.checkpoint(zoo.GPTBlock(), torch.randn(2, 5, zoo.WIDTH, requires_grad=True))
    may_go.set()
    other.join()


def test_a_model_whose_blocks_all_run_plain_is_not_told_that_none_has_run(caplog):
    runtime, block = Runtime(load({"adacc": {}}), has_engine=True), zoo.GPTBlock()
    wrap_blocks({"block": block}, runtime)
    adacc = Adacc(runtime, {"block": block})
    for _ in range(2):
        with save_on_cpu():
            block(torch.randn(2, 9, zoo.WIDTH)).sum().backward()
        adacc.end_step()
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warned) == 1 and "runs without ds_adacc, under plain autograd" in warned[0]


def cached(run, block, x):
    """The gradients of a cached loss (GradCache): a hook on the embeddings runs the forward again, within backward."""
    with torch.no_grad():
        embeddings = run(block, x).requires_grad_()

    def run_again(gradient):
        with torch.enable_grad():
            again = run(block, x)
        again.backward(gradient)

    embeddings.register_hook(run_again)
    zoo.loss_of(embeddings).backward()
    gradients = [parameter.grad for parameter in block.parameters()]
    block.zero_grad()
    return gradients


def test_a_cached_loss_runs_plain_and_is_told_what_to_use_instead(caplog):
    work, block = Runtime(load({"adacc": SECTION})), zoo.EagerBlock(dropout=0.0)
    x = torch.randn(2, 5, zoo.WIDTH)
    zoo.assert_same(cached(plain, block, x), cached(work.checkpoint, block, x))
    (told,) = [line for line in caplog.messages if "plain autograd" in line]
    assert "within a backward, as by cached losses (GradCache)" in told
    assert told.endswith("enable the gradient checkpointing of transformers: torch.utils.checkpoint then runs it")
