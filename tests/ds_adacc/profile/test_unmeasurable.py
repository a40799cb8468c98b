"""What must not be run ahead of training's own backward is told, and why."""

import pytest
import torch
import zoo
from overwriting import FunctionBlock, Overwriting, OverwritingSilu
from recorded import call_of
from torch import nn

from ds_adacc.profile.unmeasurable import why_unmeasurable
from ds_adacc.record.capture import capture


def captured(block, args, kwargs):
    return capture("block", call_of(block, *args, **kwargs))


def refused(block, args, kwargs):
    found = captured(block, args, kwargs)
    return why_unmeasurable(found.output, found.inputs, found.recording)


def test_what_must_not_run_ahead_of_training_is_refused():
    assert refused(*zoo.example("gpt")) is None
    assert refused(*zoo.example("opaque")).startswith("its backward runs _OpaqueBackward, which may hold ")
    block, args, kwargs = zoo.example("gpt")
    block.fc1.weight.register_hook(lambda gradient: None)
    assert refused(block, args, kwargs) == "a hook on a parameter or an input waits for its gradient"
    for register in (nn.Module.register_full_backward_hook, nn.Module.register_full_backward_pre_hook):
        block, args, kwargs = zoo.example("gpt")
        register(block.fc1, lambda *_: None)
        assert refused(block, args, kwargs) == "a module in it has a backward hook, which would run more than once"


def of_tensor(y):
    y.register_hook(lambda gradient: None)


def of_node(y):
    y.grad_fn.register_hook(lambda *gradients: None)


def before_node(y):
    y.grad_fn.register_prehook(lambda *gradients: None)


@pytest.mark.parametrize("register", [of_tensor, of_node, before_node, torch.Tensor.retain_grad])
def test_a_hook_on_a_tensor_must_not_run_ahead_of_training(register):
    block, args, kwargs = zoo.example("gpt")
    plain = captured(block, args, kwargs).recording.digest
    block.fc1.register_forward_hook(lambda module, given, y: register(y))
    assert refused(block, args, kwargs) == "a hook on a tensor in it would run more than once"
    assert captured(block, args, kwargs).recording.digest != plain  # in another block of its type, it must not either


class KeepingSilu(Overwriting):
    """Keeps a tensor that no hook has seen. By its name it only computes."""

    @staticmethod
    def forward(ctx, x):
        ctx.scale = torch.zeros(2)
        return Overwriting.forward(ctx, x)


def test_a_function_that_keeps_a_tensor_to_itself_is_refused():
    block = nn.Module()
    block.forward = KeepingSilu.apply
    assert "its backward runs KeepingSiluBackward" in refused(block, (torch.randn(4, 4, requires_grad=True),), {})


def test_a_function_beside_a_main_grad_is_refused_for_it_may_add_to_it():
    block, args = FunctionBlock(OverwritingSilu), (torch.randn(8, 64, requires_grad=True),)
    assert refused(block, args, {}) is None
    block.fc.weight.main_grad = torch.zeros(64, 64)
    assert refused(block, args, {}).endswith("SiluBackward, which may add to a parameter's main_grad")


def test_a_function_that_is_not_known_is_refused():
    block = nn.Module()
    block.forward = Overwriting.apply
    assert "its backward runs OverwritingBackward" in refused(block, (torch.randn(4, 4, requires_grad=True),), {})


class InPlace(nn.Linear):
    """Adds to what it is given, and returns that."""

    def forward(self, x):
        x += super().forward(x.clone()).tanh()
        return x


def test_a_block_that_returns_its_inputs_memory_is_refused():
    x = torch.randn(3, 4, requires_grad=True) * 1.0
    assert refused(InPlace(4, 4), (x,), {}) == "it returns its inputs, or writes its results into their memory"


def test_a_block_without_gradients_is_refused():
    block = nn.Linear(4, 4).requires_grad_(False)
    assert refused(block, (torch.randn(3, 4),), {}) == "no gradient flows through the tensors that it takes and returns"
