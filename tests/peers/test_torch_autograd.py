"""The cases of PyTorch's own tests of checkpointing in test/test_autograd.py (pytorch/pytorch, TestAutograd)."""

import pytest
import torch
from storages import Storages
from torch import nn

SEEN = []


class Scaling(torch.autograd.Function):
    """Its backward adds what it was given to SEEN."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        SEEN.append(scale)
        return gradient * scale, (gradient * x).sum()


def test_a_deep_net_of_many_calls(peer):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    inputs = [torch.randn(2, 8, requires_grad=True) for _ in range(6)]

    def case(call):
        feature = torch.zeros(2, 8)
        for x in inputs:
            feature = feature + call(net, x)
        return torch.autograd.grad(feature.mean(), [*inputs, *net.parameters()])

    peer.compare(case)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_the_input_needs_a_gradient_or_not(peer, requires_grad):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.GELU())
    x = torch.randn(3, 8, requires_grad=requires_grad)

    def case(call):
        x.grad = None
        net.zero_grad()
        call(net, x).sum().backward()
        return x.grad, [p.grad for p in net.parameters()]

    peer.compare(case)


@pytest.mark.parametrize("enabled", [True, False])
def test_autocast_of_forward_holds_in_backward(peer, enabled):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())
    x = torch.randn(3, 8, requires_grad=True)

    def case(call):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            output = call(net, x)
        return output, torch.autograd.grad(output.float().sum(), [x, *net.parameters()])

    peer.compare(case)


def test_a_parameter_is_used_inside_and_outside(peer):
    """A hook on it runs once."""
    weight, x = nn.Parameter(torch.randn(10, 10)), torch.randn(4, 10, requires_grad=True)
    ran = []
    weight.register_hook(lambda gradient: ran.append(0))

    def case(call):
        ran.clear()
        weight.grad = x.grad = None
        inner = call(lambda x: x.mm(weight).sigmoid(), x.mm(weight).tanh())
        inner.mm(weight).sum().backward()
        return weight.grad, x.grad, len(ran)

    peer.compare(case)


def test_a_function_of_the_users_own(peer):
    x, scale = torch.randn(5, requires_grad=True), torch.tensor(1.5, requires_grad=True)

    def case(call):
        output = call(lambda x, scale: Scaling.apply(Scaling.apply(x, scale).sigmoid(), scale), x, scale)
        return torch.autograd.grad(output.sum(), [x, scale])

    peer.compare(case)


class Product(torch.autograd.Function):
    """Saves its inputs, what it computes and its output, and unpacks them twice."""

    @staticmethod
    def forward(ctx, x, y):
        inner = x * y
        output = inner + inner.exp()
        ctx.save_for_backward(x, y, inner, output)
        return output

    @staticmethod
    def backward(ctx, gradient):
        x, y, inner, output = (one + other for one, other in zip(ctx.saved_tensors, ctx.saved_tensors, strict=True))
        return gradient * y * output, gradient * x * inner


def test_a_function_of_the_users_own_unpacks_twice(peer):
    x, y = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)

    def case(call):
        output = call(lambda x, y: Product.apply(x * y * y, y.sin()).tanh(), x, y)
        return torch.autograd.grad(output.sum(), [x, y])

    peer.compare(case)


def test_a_saved_constant_is_the_very_object(peer):
    """As under plain autograd, where it needs no gradient and the block does not make it."""
    x, scale = torch.randn(5, requires_grad=True), nn.Parameter(torch.tensor(1.5), requires_grad=False)
    frozen = nn.Module()
    frozen.scale = scale
    frozen.forward = lambda x: Scaling.apply(x, scale)

    def case(call):
        SEEN.clear()
        gradient = torch.autograd.grad(call(frozen, x).sum(), x)
        return gradient, SEEN.pop() is scale

    peer.compare(case, quiet=False)  # `forward` is a function in the module's own dict


def test_arguments_of_any_kind(peer):
    """Tensors in a dict are arguments too; the output is a dict."""
    layer = nn.Linear(4, 4)

    def case(call):
        x = torch.randn(2, 4, requires_grad=True)
        outputs = call(lambda tree: {"out": layer(tree["x"]).relu() * tree["factor"]}, {"x": x, "factor": 2})
        return torch.autograd.grad(outputs["out"].sum(), [x, *layer.parameters()])

    peer.compare(case)


def test_a_detached_tensor_inside(peer):
    """Its forward runs without gradients, and only the other branch has a backward."""
    layer, other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(x):
        with torch.no_grad():
            held = other(x).exp()
        return layer(x) * held + layer(x).detach()

    def case(call):
        x = torch.randn(2, 4, requires_grad=True)
        return torch.autograd.grad(call(forward, x).sum(), [x, *layer.parameters()])

    peer.compare(case)


def test_nothing_inside_has_a_gradient(peer):
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(2, 4, requires_grad=True)

    def case(call):
        output = call(torch.no_grad()(lambda x: layers(x)), x) + x
        return torch.autograd.grad(output.sum(), x)

    peer.compare(case)


def test_data_parallel_without_devices(peer):
    layer = nn.DataParallel(nn.Sequential(nn.Linear(4, 4), nn.GELU()))
    x = torch.randn(2, 4, requires_grad=True)
    peer.compare(lambda call: torch.autograd.grad(call(layer, x).sum(), [x, *layer.parameters()]))


def test_several_backward_passes(peer):
    x = torch.randn(3, 3, requires_grad=True)

    def case(call):
        output = call(lambda x: x.exp().sin().exp(), x)
        return [torch.autograd.grad(output.sum(), x, retain_graph=True) for _ in range(3)]

    peer.compare(case)


def test_saved_tensors_are_read_twice_before_backward(peer):
    x = torch.randn(3, 3, requires_grad=True)

    def case(call):
        output = call(lambda x: x.exp().sin(), x)
        saved = output.grad_fn._saved_self, output.grad_fn._saved_self
        return saved, torch.autograd.grad(output.sum(), x)

    peer.compare(case)


def test_an_error_in_forward_leaves_nothing_behind(peer):
    net, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)

    def failing(x):
        raise ValueError(net(x).shape)

    def case(call):
        with pytest.raises(ValueError, match="2, 4"):
            call(failing, x)
        return torch.autograd.grad(call(lambda x: net(x).exp(), x).sum(), [x, *net.parameters()])

    peer.compare(case)


def test_an_error_in_backward_leaves_nothing_behind(peer):
    x = torch.randn(2, 4, requires_grad=True)

    def case(call):
        output = call(lambda x: x.exp().sin().exp(), x)
        handle = output.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            output.sum().backward()
        handle.remove()
        return torch.autograd.grad(call(lambda x: x.exp().sin().exp(), x).sum(), x)

    peer.compare(case)


def test_a_forward_that_differs_is_not_taken_for_the_recorded_one(peer):
    """PyTorch raises an error where the recomputed forward differs; there is no second forward here to differ."""
    x, turns = torch.randn(4, requires_grad=True), []

    def case(call):
        output = call(lambda x: (x.exp() if len(turns) % 2 else x.sin()).tanh(), x)
        is_exp = len(turns) % 2 == 1
        turns.append(0)
        (gradient,) = torch.autograd.grad(output.sum(), x)
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (expected,) = torch.autograd.grad((y.exp() if is_exp else y.sin()).tanh().sum(), y)
        return torch.equal(gradient, expected)

    peer.compare(case, quiet=False)


def test_less_is_held_than_without(peer):
    """The hidden values of a chain are not held between forward and backward."""
    torch.manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(32, 32), nn.GELU())))
    x = torch.randn(64, 32, requires_grad=True)

    def held(call):
        with Storages() as storages:
            output = call(net, x)
            found = storages.alive()
            output.sum().backward()
        return found

    before = held(lambda function, x: function(x))
    assert peer.runs(held)[-1] < 0.6 * before
    assert all(variant.bound.segments for _, variant in peer.runtime.blocks.variants())
