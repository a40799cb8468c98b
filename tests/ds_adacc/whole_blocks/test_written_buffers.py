"""What buffers held before a forward: a second one finds that, and leaves the buffers themselves alone."""

import pytest
import torch
from recorded import captured
from torch import nn

from ds_adacc.python_state.closure import closure_of
from ds_adacc.whole_blocks.written_buffers import WrittenBuffers, why_not_put_back


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("none", None)

    def forward(self, x):
        self.count += 1
        return x + self.count


def test_within_each_time_they_are_as_before_and_afterwards_as_they_were():
    module = Counting()
    before = WrittenBuffers(closure_of(module))
    itself = module.count
    module(torch.zeros(2))
    for _ in range(2):
        with before.as_before():
            assert module.count is not itself
            assert torch.equal(module.count, torch.zeros(2))
            module(torch.zeros(2))
    assert module.count is itself
    assert torch.equal(itself, torch.ones(2))
    assert itself._version == 1


class Sharing(nn.Module):
    def __init__(self, other=lambda buffer: buffer):
        super().__init__()
        self.one, self.two = Counting(), Counting()
        self.two.register_buffer("count", other(self.one.count))


def test_a_buffer_of_two_modules_is_one_within_as_well():
    module = Sharing()
    itself, before = module.one.count, WrittenBuffers(closure_of(module))
    with before.as_before():
        assert module.one.count is module.two.count is not itself
    assert module.one.count is module.two.count is itself


def written(module):
    """A recording of the module, and its closure."""
    closure = closure_of(module)
    return closure, captured(module.one, torch.randn(2, requires_grad=True)).recording


@pytest.mark.parametrize(
    "other, reason",
    [
        (lambda buffer: buffer, None),
        (lambda buffer: buffer.clone(), None),
        (lambda buffer: buffer[:1], "of which it holds another view"),
        (lambda buffer: buffer.detach(), "of which it holds another view"),
    ],
)
def test_a_view_of_one_that_is_written_to_cannot_be_put_back(other, reason):
    found = why_not_put_back(*written(Sharing(other)))
    assert found is None if reason is None else reason in found


def test_nor_can_one_that_is_an_attribute_too():
    module = Sharing(torch.clone)
    module.kept = [module.one.count]
    assert "of which it holds another view" in why_not_put_back(*written(module))


def test_nor_can_a_large_one():
    module = Sharing(torch.clone)
    module.one.count = torch.zeros((1 << 18) + 1)
    closure = closure_of(module)
    recording = captured(module.one, torch.randn((1 << 18) + 1, requires_grad=True)).recording
    assert "a large tensor" in why_not_put_back(closure, recording)


def test_buffers_of_other_kinds_are_left_alone():
    module = Counting()
    module.register_buffer("sparse", torch.eye(2).to_sparse())
    module.register_buffer("meta", torch.empty(2, device="meta"))
    sparse, before = module.sparse, WrittenBuffers(closure_of(module))
    with before.as_before():
        assert module.sparse is sparse
        assert torch.equal(module.count, torch.zeros(2))
    recording = captured(module, torch.randn(2, requires_grad=True)).recording
    assert why_not_put_back(closure_of(module), recording) is None


def test_they_are_put_back_if_the_forward_fails():
    module = Counting()
    itself, before = module.count, WrittenBuffers(closure_of(module))
    try:
        with before.as_before():
            raise KeyError
    except KeyError:
        pass
    assert module.count is itself
