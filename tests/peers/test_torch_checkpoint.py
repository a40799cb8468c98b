"""The cases of PyTorch's tests of `torch.utils.checkpoint` (pytorch/pytorch, test/test_utils.py, TestCheckpoint)."""

import random

import pytest
import torch
from storages import Storages
from torch import nn


def layers():
    torch.manual_seed(0)
    return [nn.Linear(20, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU()]


def in_chunks(modules, chunks, call, x):
    """All but the last chunk are checkpointed, as `checkpoint_sequential` does it."""
    size = len(modules) // chunks

    def run(start, stop):
        def forward(x):
            for module in modules[start:stop]:
                x = module(x)
            return x

        return forward

    for start in range(0, size * (chunks - 1), size):
        x = call(run(start, start + size), x)
    return run(size * (chunks - 1), len(modules))(x)


def test_forward_runs_once_and_backward_does_not_run_it_again(peer):
    calls = []

    class Doubling(nn.Module):
        def forward(self, x):
            calls.append(0)
            return x * torch.tensor(2.0)

    modules, x = [Doubling() for _ in range(10)], torch.randn(3, 4, requires_grad=True)

    def case(call):
        calls.clear()
        gradient = torch.autograd.grad(in_chunks(modules, 2, call, x).sum(), x)
        return gradient, len(calls)

    peer.compare(case, quiet=False)  # the list that each call appends to is told of


def test_gradients_of_gradients(peer):
    modules, x = layers(), torch.randn(1, 20, requires_grad=True)

    def case(call):
        output = in_chunks(modules, 2, call, x)
        return output, torch.autograd.grad(output, x, torch.ones_like(output), create_graph=True)

    peer.compare(case)


@pytest.mark.parametrize("container", [list, nn.ModuleList, lambda modules: nn.Sequential(*modules)])
def test_a_sequence_in_chunks(peer, container):
    modules, x = layers(), torch.randn(1, 20, requires_grad=True)
    parameters = [p for module in modules for p in module.parameters()]

    def case(call):
        output = in_chunks(container(modules), 2, call, x)
        return output, torch.autograd.grad(output.sum(), [x, *parameters])

    peer.compare(case)


def test_random_numbers_go_on_after_the_block(peer):
    first, second, x = nn.Dropout(), nn.Dropout(), torch.randn(2000, requires_grad=True)

    def case(call):
        output = call(lambda value: second(value), first(x))
        return torch.autograd.grad(output.sum(), x), torch.rand(3)

    peer.compare(case)


def test_an_argument_is_none(peer):
    def add(one, other):
        return one if other is None else one + other

    x = torch.randn(1, 10, requires_grad=True)
    peer.compare(lambda call: torch.autograd.grad(call(add, x, None).sum(), x))


def mixed(one, two, scale, three):
    """Of the arguments some are tensors; of the outputs two are written in place, and one is an input."""
    four = one + two * three
    five = one * two + three
    four *= scale
    five *= scale
    return scale, four, None, True, five, "bar", one


def test_inputs_and_outputs_that_are_no_tensors(peer):
    one, two = (torch.rand(10, requires_grad=True) for _ in range(2))
    three, scale = torch.rand(10), random.randint(1, 10)

    def case(call):
        outputs = call(mixed, one, two, scale, three)
        one.grad = two.grad = None
        for index, keep in ((1, True), (4, True), (6, False)):
            outputs[index].sum().backward(retain_graph=keep)
        return outputs, one.grad, two.grad

    peer.compare(case)


def test_a_second_backward_is_refused_as_ever(peer):
    x = torch.rand(10, requires_grad=True)

    def case(call):
        output = call(lambda x: x.exp().sin(), x).sum()
        output.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            output.backward()
        return ()

    peer.compare(case)


def test_no_argument_is_a_tensor(peer):
    numbers = random.random(), random.random(), 3, random.random()
    peer.compare(lambda call: call(mixed, *numbers), quiet=False)


def test_some_inputs_need_no_gradient(peer):
    x, constant = torch.randn(1, 4, requires_grad=True), torch.randn(1, 4)
    peer.compare(lambda call: torch.autograd.grad(call(lambda a, b: (a, b), x, constant)[0].sum(), x))


def test_no_output_needs_a_gradient(peer):
    x, constant = torch.randn(1, 4, requires_grad=True), torch.randn(1, 4)

    def case(call):
        output = call(lambda a, b: a, constant, x)
        with pytest.raises(RuntimeError, match="does not require grad"):
            output.sum().backward()
        return output, output.requires_grad

    peer.compare(case)


@pytest.mark.parametrize("keeps_graph", [False, True])
def test_backward_frees_as_it_goes(peer, keeps_graph):
    """With the graph retained, plain autograd keeps what the blocks' backward need not keep."""
    x = torch.zeros(1000, requires_grad=True)
    x.grad = torch.zeros_like(x)

    def levels(call):
        seen = []

        def chain(value):
            for _ in range(3):
                value = value**2
                value.register_hook(lambda _: seen.append(storages.alive()))
            return (value**2).sum()

        with Storages() as storages:
            call(chain, x).backward(retain_graph=keeps_graph)
        return seen

    before = levels(lambda function, *args: function(*args))
    for after in peer.runs(levels)[1:]:
        assert len(after) == 3 and after[-1] <= before[-1]


def test_defaults_of_forward_hold_in_backward(peer):
    """A tensor made without a dtype is rebuilt with the one that it had, whatever the default is by then."""
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def making(x):
        made = torch.full((4,), 3.0)
        return made.exp() * x, made.dtype

    def case(call):
        torch.set_default_dtype(torch.float64)
        try:
            output, dtype = call(making, x)
        finally:
            torch.set_default_dtype(torch.float32)
        return torch.autograd.grad(output.sum(), x), dtype

    peer.compare(case)
