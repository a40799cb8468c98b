"""Kernels that a block launches itself write to tensors by address: neither what was there nor what is, is rebuilt."""

import threading

import contourpy
import pytest
import torch
import zoo
from opaque import array
from recorded import call_of, captured, under

from ds_adacc.program.same_bits import checksum
from ds_adacc.record import known_tensors
from ds_adacc.record.capture import capture


class Routed(torch.nn.Module):
    """`write`: called with the block, its input, and what is to be multiplied by what it writes."""

    def __init__(self, write):
        super().__init__()
        self.linear, self.write = torch.nn.Linear(8, 8), write
        self.register_buffer("scale", torch.full((8,), 2.0))

    def forward(self, x):
        return self.write(self, x, self.linear(x).sin())


def into_zeros(block, x, y):
    rows = torch.zeros_like(x)
    array(rows)[...] = 3.0
    return y * rows


def twice(block, x, y):
    rows = torch.zeros_like(x)
    memory = array(rows)
    memory[...] = 3.0
    first = y * (rows + 1)
    memory[...] = 5.0
    return first * (rows + 1)


def into_what_was_read(block, x, y):
    rows = x.detach() * 2
    first = y * (rows + 1)
    array(rows)[...] = 7.0
    return first * (rows + 1)


def in_another_order(block, x, y):
    rows = torch.arange(x.numel(), dtype=x.dtype).view_as(x) * 1
    array(rows)[...] = array(rows)[::-1].copy()
    return y * rows


def into_a_view(block, x, y):
    rows = torch.zeros(2, *x.shape)
    array(rows[1])[...] = 3.0
    return y * rows.sum(0)


def after_a_seen_one(block, x, y):
    rows = torch.zeros_like(x)
    memory = array(rows)
    rows.add_(1.0)
    first = y * (rows + 1)
    memory[...] = 5.0
    return first * (rows + 1)


def into_a_buffer_that_is_read_after_its_address_was_taken(block, x, y):
    memory = array(block.scale)
    y = (y * (block.scale + 1)).cos()
    memory[...] *= 2.0
    y = y * (block.scale + 1)
    memory[...] = 2.0
    return y


class Shifted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + 1

    @staticmethod
    def backward(ctx, grad):
        return grad


def applied(block, x, y):
    rows = torch.ones_like(x).cumsum(0)
    return y * rows.apply_(lambda v: 0.5 if v == 2 else v)


def mapped_in_a_view(block, x, y):
    rows = torch.zeros(2, *x.shape)
    rows[1].map_(x.detach(), lambda _, v: v + 1)
    return y * rows.sum(0)


def by_threads(block, x, y):
    rows = torch.zeros_like(x)
    threads = [threading.Thread(target=rows[k::2].fill_, args=(3.0 + k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return y * rows


def before_a_function(block, x, y):
    rows = torch.zeros_like(x)
    array(rows)[...] = 3.0
    return y * Shifted.apply(rows)


WRITES = [into_zeros, twice, into_what_was_read, in_another_order, into_a_view, after_a_seen_one]
WRITES += [applied, mapped_in_a_view, by_threads]
WRITES += [into_a_buffer_that_is_read_after_its_address_was_taken, before_a_function]


def batch():
    return torch.randn(3, 8, requires_grad=True)


@pytest.mark.parametrize("write", WRITES)
def test_recomputed_the_gradients_are_bit_identical(write):
    block, args = Routed(write), (batch(),)
    expected = zoo.gradients(block, args, {})
    recording = captured(block, *args).recording
    run, _ = under(block, recording)
    zoo.assert_same_bits(expected, zoo.gradients(block, args, {}, run))


def test_what_a_function_of_elements_writes_is_a_write_though_it_changed_no_bit():
    def leave(block, x, y):
        return y * torch.ones_like(x).apply_(lambda v: v)

    recording = captured(Routed(leave), batch()).recording
    refusals = {op.refusal for op in recording.ops}
    assert refusals == {
        None,
        "ones_like2 is overwritten in place",
        "writes where PyTorch does not see it",
        "may hold a number read from data",
    }


def test_what_has_nothing_to_do_with_the_write_is_recomputed():
    recording = captured(Routed(into_zeros), batch()).recording
    assert "an autograd.Function or an operator of torch.library" in "".join(recording.remarks)
    refusals = {(op.short_name, op.refusal) for op in recording.ops}
    assert refusals == {
        ("addmm", None),
        ("sin", None),
        ("zeros_like", "zeros_like2 is overwritten in place"),
        ("kernel", "writes where PyTorch does not see it"),
        ("mul", None),
    }


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_a_write_after_all_else_is_noticed(scale):
    """As of a scale that follows what has just been multiplied by it."""

    def write(block, x, y):
        y = (y * (block.scale + 1)).cos()
        array(block.scale)[...] *= scale
        return y

    recording = captured(Routed(write), batch()).recording
    (add,) = (op for op in recording.ops if op.short_name == "add")
    assert add.refusal == (None if scale == 1.0 else "buffer.0 is overwritten in place")


def test_a_block_that_writes_to_what_backward_needs_is_not_recorded():
    def write(block, x, y):
        y = y.exp()
        array(y)[...] = 1.0
        return y

    found = capture("block", call_of(Routed(write), batch()))
    assert found.recording is None
    assert "saves exp2 for backward and then writes to it in place" in found.reason


def test_memory_that_a_tensor_is_given_is_no_unseen_write():
    def give(block, x, y):
        y.data_ptr()
        z = x.new_empty(0)
        z.set_((x.detach() * 2).untyped_storage(), 0, x.shape, x.stride())
        return y * z

    recording = captured(Routed(give), batch()).recording
    assert not any(op.short_name == "kernel" for op in recording.ops)


def test_an_address_that_nobody_writes_to_changes_nothing():
    def read(block, x, y):
        rows = torch.zeros_like(x)
        return y * (rows + array(rows)[0, 0].item())

    recording = captured(Routed(read), batch()).recording
    assert [op.refusal for op in recording.ops] == [None] * 5
    assert not recording.remarks


def test_what_lies_elsewhere_than_an_address_is_not_read(monkeypatch):
    """On a GPU, each checksum has the host wait. Some models ask how the address of a weight is aligned."""
    read = []
    monkeypatch.setattr(known_tensors, "checksum", lambda tensor: read.append(tensor.shape) or checksum(tensor))

    def ask(block, x, y):
        rows = torch.zeros(2, 3)
        assert block.linear.weight.data_ptr() % 4 == rows.data_ptr() % 4 == 0
        return y * x.cos() * rows.sum()

    recording = captured(Routed(ask), batch()).recording
    assert [op.refusal for op in recording.ops] == [None] * 7
    assert set(read) == {(2, 3)}


def test_a_write_to_two_values_in_one_storage_is_one_operator():
    base = torch.randn(6, 8)

    def block(x, y):
        out = x + y
        array(base)[...] = 3.0
        return out + (x + y)

    ops = captured(block, *base.chunk(2)).recording.ops
    (kernel,) = (op for op in ops if op.short_name == "kernel")
    assert len(kernel.outputs) == 2


def test_statistics_of_batch_norm_are_no_unseen_writes():
    """Its operator updates them, and does not say so."""
    norm = torch.nn.BatchNorm1d(8)

    def normalized(block, x, y):
        y = norm(y)
        contourpy.max_threads()  # a function that pybind11 binds might write to anything
        return norm(y)

    block = Routed(normalized)
    block.norm = norm
    assert not captured(block, batch()).recording.remarks


def test_tensors_without_memory_of_their_own_are_no_error():
    sparse = torch.eye(3).to_sparse()

    def multiply(block, x, y):
        y.data_ptr()
        return torch.sparse.mm(sparse, y)

    found = capture("block", call_of(Routed(multiply), batch()))
    assert found.recording is None
    assert "it handles a tensor of layout torch.sparse_coo" in found.reason
