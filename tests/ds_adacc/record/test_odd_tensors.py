"""Tensors of unusual looks: an element of any stride, transposed noise, masks that select, empty and nested ones."""

import functools

import pytest
import torch
import torch.nn.functional as F
import zoo
from recomputing import recomputing
from recorded import profile_of, record, under
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.kernels import make_codec
from ds_adacc.runtime.runtime import Runtime


class Block(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def exact(function, x, policy_of=planner.recompute_policy):
    """The recording; its gradients under the policy have the bits of plain autograd's."""
    block, args = Block(function), (x.requires_grad_(),)
    recording = record(block, args, {})
    run, calls = under(block, recording, policy_of(profile_of(recording)))
    zoo.assert_exact(block, args, {}, run)
    assert not calls[0].diverged
    return recording


def test_a_single_element_may_have_any_stride():
    x = torch.randn(3).as_strided((1,), (3,))
    recording = exact(lambda x: x.clone() ** 2, x)
    assert recording.values[recording.ops[0].outputs[0]].geometry.stride == (3,)
    assert recording.ops[0].replayable


def test_noise_of_a_transposed_tensor_is_a_mask_too():
    recording = exact(lambda x: F.dropout(x, 0.4), torch.randn(3, 4, 5).transpose(0, 2))
    (noise,) = recording.saved
    assert recording.values[noise].geometry.stride == (1, 5, 20)
    assert recording.values[noise].two_valued and recording.values[noise].role == "dropout_mask"


def test_noise_times_a_parameter_is_no_mask_though_it_has_two_values_now():
    scale = nn.Parameter(torch.ones(5))
    recording = exact(lambda x: x * (torch.empty(4, 5).bernoulli_(0.6) * scale), torch.randn(4, 5))
    made = [value for value in recording.values if value.index in recording.saved and value.origin == "made"]
    assert [(v.name.rstrip("0123456789"), v.two_valued) for v in made] == [("bernoulli_", True), ("mul", False)]


def test_a_recording_keeps_no_memory_that_a_tensor_is_given():
    memory = []

    def block(x):
        z, w = x.detach() * 3, x.detach() * 2
        z.set_(w.untyped_storage(), 0, w.shape, w.stride())
        memory.append(StorageWeakRef(w.untyped_storage()))
        return x * z

    recording = exact(block, torch.randn(4, 5))
    assert [op.refusal for op in recording.ops if op.short_name == "set_"] == ["gives a tensor other memory"]
    assert all(each.expired() for each in memory)


def test_a_mask_that_selects_is_never_rebuilt():
    """Rebuilt from quantised data it would select another number of elements than forward did."""
    block = Block(lambda x: (h := x * 3).tanh().sum() + h[h > 0].sum())
    torch.manual_seed(2)
    x = torch.randn(8, 8).requires_grad_()
    recording = record(block, (x,), {})
    assert [op.refusal for op in recording.ops if op.short_name == "gt"] == ["its mask decides a shape"]
    policy = planner.recompute_policy(profile_of(recording))
    codec = make_codec("token", backend="reference", group_size=2)
    run, _ = under(block, recording, planner.Policy(("token", *policy.stores[1:])), {0: codec})
    run(x).backward()
    restored = codec.decompress(codec.compress(x.detach()), x.shape, x.dtype)
    assert ((restored > 0) != (x > 0)).any()
    assert torch.allclose(x.grad, 3 * (x > 0) + 3 * (1 - (restored * 3).tanh() ** 2), atol=1e-5)


@pytest.mark.parametrize("policy_of", [planner.retain_policy, planner.recompute_policy])
def test_an_empty_view_keeps_no_memory_but_counts_writes(policy_of):
    held = []

    def function(x):
        h = x * 2
        held.append(h)
        return h[:, :0] * h[:, 4:]

    block, args = Block(function), (torch.randn(4, 4).requires_grad_(),)
    recording = record(block, args, {})
    run, _ = under(block, recording, policy_of(profile_of(recording)))
    output = run(*args)
    storage = torch.multiprocessing.reductions.StorageWeakRef(held[-1].untyped_storage())
    held.clear()
    assert storage.expired()
    output.sum().backward()
    output = run(*args)
    with torch.no_grad():
        held[-1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an in-place operation"):
        output.sum().backward()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_block_that_makes_nested_tensors_runs_under_plain_autograd():
    def padded(x):
        return torch.nested.as_nested_tensor([x[0], x[1, :2]]).to_padded_tensor(0.0).tanh()

    block, args = Block(padded), (torch.randn(2, 3, 4, requires_grad=True),)
    runtime = Runtime(load({"adacc": {"memory_budget": 0.5, "codecs": "none"}}))
    for _ in range(2):
        ours = zoo.gradients(block, args, {}, lambda x: runtime.checkpoint(block, x))
        zoo.assert_same_bits(zoo.gradients(block, args, {}), ours)
    (variant,) = runtime.blocks.all()[0].variants()
    assert not variant.is_recorded


class Activated(nn.Module):
    """A layer with an activation that the caller chooses, as a module or a function."""

    def __init__(self, activation):
        super().__init__()
        self.layer, self.activation = nn.Linear(4, 4), activation

    def forward(self, x):
        return self.activation(self.layer(x))


def tangents(x):
    output, tangent = torch.func.jvp(lambda z: F.silu(z @ torch.ones(4, 4)), (x,), (torch.ones_like(x),))
    return output + tangent


def quantized(x):
    return x * torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8).dequantize()


def shaped_by_meta(x):
    return F.gelu(x) * (x.to("meta") @ torch.empty(4, 5, device="meta")).shape[-1]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("activation", "reason"),
    [
        (tangents, "it handles a tensor of zeros without memory, as torch.func.jvp makes them"),
        (torch.jit.script(nn.GELU()), "it has a module of TorchScript (RecursiveScriptModule), whose code cannot"),
        (quantized, "it handles a quantized tensor"),
        (shaped_by_meta, "it handles a tensor without data, on the device 'meta'"),
    ],
    ids=["jvp", "TorchScript", "quantized", "meta"],
)
def test_what_cannot_be_recorded_runs_under_plain_autograd(activation, reason, caplog):
    block, args = Activated(activation), (torch.randn(2, 3, 4, requires_grad=True),)
    runtime = Runtime(load({"adacc": {"memory_budget": 0.5, "codecs": "none"}}))
    for _ in range(3):
        ours = zoo.gradients(block, args, {}, lambda x: runtime.checkpoint(block, x))
        zoo.assert_same_bits(zoo.gradients(block, args, {}), ours)
    assert caplog.text.count(f"runs without ds_adacc, under plain autograd: {reason}") == 1


@torch.jit.script
def branch(x):
    return x.tanh() * x.sigmoid()


@torch.jit.script
def branches(x):
    other = torch.jit.fork(branch, x)
    return x.sin().exp() + torch.jit.wait(other)


def branches_if_long(x):
    return branches(x) if x.shape[1] > 5 else x.sin().exp() + branch(x)


@pytest.mark.parametrize("activation", [branches, branches_if_long])
def test_a_block_that_runs_in_several_threads_runs_under_plain_autograd(activation, caplog):
    """Autograd saves from all of them, in an order that differs from call to call."""
    block = Activated(activation)
    for length in (3, 8) * 3:  # TorchScript optimises what it runs again, and then gives other bits
        zoo.gradients(block, (torch.randn(2, length, 4, requires_grad=True),), {})
    runtime = Runtime(load({"adacc": {"memory_budget": 0.9, "codecs": "none"}}))
    for length in (3, 3, 4, 5, 6, 7, 8) * 5:
        args = (torch.randn(2, length, 4, requires_grad=True),)
        ours = zoo.gradients(block, args, {}, lambda x: runtime.checkpoint(block, x))
        zoo.assert_same_bits(zoo.gradients(block, args, {}), ours)
    assert caplog.text.count("under plain autograd: its operators run in several threads, as torch.jit.fork ") == 1


class Holding(nn.Module):
    """A layer that reads a tensor: a buffer of its own, or an argument."""

    def __init__(self, held):
        super().__init__()
        self.layer, self.held = nn.Linear(4, 4), held

    def forward(self, x, given=None):
        other = self.held if given is None else given
        factor = other.dequantize().mean() if other.is_quantized else other.shape[-1]
        return F.gelu(self.layer(x)).sin().cos() * factor


ODD = {
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 0, torch.qint8),
    "meta": lambda: torch.empty(3, 4, device="meta"),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("is_given", [False, True])
def test_odd_tensors_from_elsewhere_leave_the_gradients_those_of_plain_autograd(kind, is_given):
    odd = ODD[kind]()
    block = Holding(None if is_given else odd)
    args = (torch.randn(2, 3, 4, requires_grad=True), *([odd] if is_given else []))
    runtime = Runtime(load({"adacc": {"memory_budget": 0.95, "codecs": "none"}}))
    for _ in range(3):
        ours = zoo.gradients(block, args, {}, lambda *given: runtime.checkpoint(block, *given))
        zoo.assert_same_bits(zoo.gradients(block, args, {}), ours)


def test_a_transform_that_torch_runs_under_no_hooks_is_named():
    block = Activated(lambda x: torch.func.grad(lambda z: z.square().sum())(x))
    runtime = Runtime(load({"adacc": {"memory_budget": 0.5, "codecs": "none"}}))
    with pytest.raises(RuntimeError, match=r'block Activated calls torch.func.grad.* list other classes in "blocks"'):
        runtime.checkpoint(block, torch.randn(2, 4, requires_grad=True))


def test_a_block_that_allows_no_hooks_is_named():
    def without_hooks(x):
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            return x.sin()

    runtime = Runtime(load({"adacc": {"memory_budget": 0.5, "codecs": "none"}}))
    what = r"torch.autograd.graph.disable_saved_tensors_hooks\('none here'\)"
    with pytest.raises(RuntimeError, match=rf'block Activated calls {what}.* list other classes in "blocks"'):
        runtime.checkpoint(Activated(without_hooks), torch.randn(2, 4, requires_grad=True))


class Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(y := x @ weight)
        return y.abs()

    @staticmethod
    def backward(ctx, grad):
        return (grad * ctx.saved_tensors[0]).real.to(torch.complex64), None


@pytest.mark.parametrize(
    "product", [torch.matmul, lambda x, weight: Adjoint.apply(x, weight.detach())], ids=["operator", "function"]
)
def test_a_conjugate_view_of_a_weight_that_is_still_real(product):
    """A replay that reads the weight itself gives the same bits, until training has changed the weight."""

    class Unitary(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(8, dtype=torch.complex64))

        def forward(self, x):
            return product(torch.complex(x, x * 2), self.weight.conj().T).abs().sin()

    block, args = Unitary(), (torch.randn(4, 8, requires_grad=True),)
    recording = record(block, args, {})
    with torch.no_grad():
        block.weight.imag.normal_()
    run, _ = under(block, recording)
    zoo.assert_exact(block, args, {}, run)
    reasons = [op.refusal for op in recording.ops if op.refusal]
    assert reasons == ["reads a view that torch conjugates or negates only when it is read"]


class InEightBits(torch.autograd.Function):
    """The tanh of x in eight bits, which is what it saves."""

    @staticmethod
    def forward(ctx, x, dtype):
        short = x.tanh().to(dtype)
        ctx.save_for_backward(short)
        return short.to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 - ctx.saved_tensors[0].to(gradient.dtype) ** 2), None


@pytest.mark.parametrize("policy_of", [planner.retain_policy, planner.recompute_policy])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz], ids=str)
def test_floats_of_eight_bits_are_retained_and_recomputed(dtype, policy_of):
    recording = exact(lambda x: InEightBits.apply(x, dtype).sin(), torch.randn(4, 6), policy_of)
    (saved,) = (recording.values[index] for index in recording.saved if recording.values[index].geometry.dtype is dtype)
    assert recording.ops[saved.producer].replayable


def test_an_empty_tensor_has_no_address():
    bags = torch.zeros(0, 3, dtype=torch.long)  # an empty batch: some of what the operator returns has no elements
    exact(lambda x: F.embedding_bag(bags, x), torch.randn(4, 5))


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.held = nn.Linear(4, 4), torch.zeros(3, 4)

    def forward(self, x, given=None):
        held = self.held if given is None else given
        y = self.linear(x) * held
        return (y * (2 if held.is_neg() else 3)).sin()


@pytest.mark.parametrize("is_argument", [False, True])
def test_a_tensor_whose_memory_has_the_negatives_is_another_one(is_argument):
    runtime, block, numbers = recomputing(), Holder(), torch.randn(3, 4, dtype=torch.cfloat)
    for part in (numbers.imag, numbers.conj().imag, numbers.imag):
        args = (torch.randn(3, 4, requires_grad=True), part)[: 1 + is_argument]
        block.held = part
        zoo.assert_exact(block, args, {}, functools.partial(runtime.checkpoint, block))
